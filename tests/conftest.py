"""Eight virtual CPU devices for every test; compiled programs are kept between runs."""

import os

os.environ.setdefault("CPU_NUM", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
