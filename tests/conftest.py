"""Eight virtual CPU devices for every test, and a compiler told to compile fast: tests run small programs once."""

import os

os.environ.setdefault("CPU_NUM", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# halves the suite's time, which is nearly all compilation
_FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ.setdefault("XLA_FLAGS", _FAST_COMPILE)

from hypothesis import settings

# an example may meet a compilation or a busy machine: time says nothing of what is tested
settings.register_profile("polyreme", deadline=None)
settings.load_profile("polyreme")
