"""polyreme.static.amp: automatic mixed precision of static Programs."""

from typing import Any

from polyreme.errors import did_you_mean
from polyreme.static.amp import bf16
from polyreme.static.amp.decorator import CustomOpLists, OptimizerWithMixedPrecision, decorate

AutoMixedPrecisionLists = CustomOpLists

__all__ = ["AutoMixedPrecisionLists", "CustomOpLists", "OptimizerWithMixedPrecision", "bf16", "decorate"]

LEFT_OUT = {
    "cast_model_to_fp16": "the pass static.passes.amp makes a Program with casts",
    "cast_parameters_to_fp16": "parameters stay float32, and so are their own master weights",
    "fp16_guard": "record the part that is to be low in an `amp.auto_cast` block instead",
}
"""Public names of the API that do not exist here, and why."""


def __getattr__(name: str) -> Any:
    if name in LEFT_OUT:
        raise AttributeError(f"polyreme.static.amp has no {name}: {LEFT_OUT[name]}")
    raise AttributeError(f"polyreme.static.amp has no name {name!r}{did_you_mean(name, __all__)}")
