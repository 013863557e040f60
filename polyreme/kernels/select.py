"""Which backend a kernel is traced for: the one place where kernels ask.

Floor: 0.  Never imports: polyreme.core.
"""

from typing import Literal

import jax

Backend = Literal["cpu", "gpu", "tpu", "other"]
_BACKENDS: dict[str, Backend] = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


def backend() -> Backend:
    """The kind of device that programs traced now will run on: JAX's default backend.

    Asked while tracing, so a compiled program keeps the kernels that were picked for it.
    A PJRT plugin whose name is not known here is "other", and gets the plain forms.
    """
    return _BACKENDS.get(jax.default_backend(), "other")
