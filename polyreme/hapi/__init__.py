"""The high-level API: Model and InputSpec, and the callbacks behind polyreme.callbacks."""

from polyreme.hapi.input_spec import InputSpec
from polyreme.hapi.model import Model

__all__ = ["InputSpec", "Model"]
