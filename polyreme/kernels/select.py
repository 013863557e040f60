"""Which backend a kernel is traced for: the one place where kernels ask.

Floor: 0.  Never imports: polyreme.core.
"""

from typing import Any, Literal

import jax

Backend = Literal["cpu", "gpu", "tpu", "other"]
_BACKENDS: dict[str, Backend] = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


_portable = jax.make_user_context(False)


def portable(wanted: bool = True) -> Any:
    """A context: programs traced inside run on any device, so every kernel takes its plain form.

    jax tells programs traced inside and outside apart, whatever it has cached.
    """
    return _portable(wanted)


def backend() -> Backend:
    """The kind of device that programs traced now will run on: JAX's default backend, "other" inside portable().

    Asked while tracing, so a compiled program keeps the kernels that were picked for it.
    A PJRT plugin whose name is not known here is "other", and gets the plain forms.
    """
    if _portable.value:
        return "other"
    return _BACKENDS.get(jax.default_backend(), "other")
