"""One operation of a program with its values, as the table of ops reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.state import Tracer
from polyreme.eager.tensor import Tensor
from polyreme.errors import CheckpointError, ShapeError
from polyreme.io.paddle_tensors import DTYPES
from polyreme.paddle_models.description import PaddleOperation

Value = Tensor | np.ndarray
"""A variable's value: an ndarray where it follows from shapes and constants alone."""
Results = Value | Mapping[str, Any]
"""What an operation gives: the value of its slot "Out", or values and lists of them by slot."""

# settings of other engines, of training, and of where a value lies
_NO_EFFECT = {
    "op_role", "op_role_var", "op_callstack", "op_namescope", "op_device", "with_quant_attr", "is_test", "use_cudnn",
    "use_mkldnn", "use_onednn", "use_quantizer", "mkldnn_data_type", "onednn_data_type", "workspace_size_MB",
    "exhaustive_search", "force_fp32_output", "Scale_in", "Scale_out", "Scale_weights", "Scale_x", "Scale_y",
    "Scale_in_eltwise", "scale_x", "scale_y", "scale_out", "x_data_format", "y_data_format", "use_addto",
    "fuse_alpha", "fuse_beta", "is_sparse", "fuse_brelu_threshold", "force_cpu", "place_type", "trainable_statistics",
    "momentum", "fix_seed", "seed", "seed_offset", "remote_prefetch", "is_distributed", "use_global_beta_pow",
    "infer_flags", "op_version", "in_dtype",
}  # fmt: skip
_UNSET: tuple[Any, ...] = (None, False, 0, 0.0, "", [], -1)


class PaddleCall:
    """An operation, and the values that variables have before it."""

    def __init__(self, operation: PaddleOperation, values: Mapping[str, Value], where: str) -> None:
        self.operation = operation
        self._read: set[str] = set()
        self._values: dict[str, list[Value]] = {}
        for slot, names in operation.inputs.items():
            missing = [name for name in names if name not in values]
            if missing:
                raise CheckpointError(f"{where}: {operation} takes {missing[0]!r}, which nothing before it gives")
            self._values[slot] = [values[name] for name in names]

    @property
    def is_known(self) -> bool:
        """Whether its result follows from shapes and constants alone."""
        return all(isinstance(v, np.ndarray) for values in self._values.values() for v in values)

    def has(self, slot: str) -> bool:
        """Whether the operation has something in a slot."""
        self._read.add(slot)
        return bool(self._values.get(slot))

    def tensor(self, slot: str) -> Tensor:
        """The Tensor in a slot. Raises CheckpointError for none, or several."""
        value = self.optional(slot)
        if value is None:
            raise CheckpointError(f"has nothing in {slot}")
        return value

    def optional(self, slot: str) -> Tensor | None:
        """The Tensor in a slot; None for none."""
        values = self.tensors(slot)
        if len(values) > 1:
            raise CheckpointError(f"has {len(values)} values in {slot}, which takes one")
        return values[0] if values else None

    def tensors(self, slot: str) -> list[Tensor]:
        """The Tensors in a slot."""
        self._read.add(slot)
        return [as_tensor(v) for v in self._values.get(slot, ())]

    def numbers(self, slot: str) -> list[Any] | None:
        """The numbers in a slot, of all its Tensors one after the other; None for none.

        Raises ShapeError for values that depend on what is fed, as a program is compiled for its shapes.
        """
        self._read.add(slot)
        numbers: list[Any] = []
        for value in self._values.get(slot, ()):
            array = value if isinstance(value, np.ndarray) else state.read(value)
            if isinstance(array, Tracer):
                raise ShapeError(
                    f"needs the numbers in {slot} ({', '.join(self.operation.inputs[slot])}) to know a shape or a "
                    "range, and they depend on the values that are fed; in what is compiled shapes follow from shapes"
                )
            numbers += np.asarray(array).reshape(-1).tolist()
        return numbers if self._values.get(slot) else None

    def constant(self, slot: str) -> Any:
        """The one number in a slot, if it does not depend on what is fed; None for none, and for one that does."""
        values = self._values.get(slot, ())
        if not values or not all(isinstance(v, np.ndarray) for v in values):
            return None
        self._read.add(slot)
        (array,) = values
        return np.asarray(array).reshape(-1)[0].item() if np.asarray(array).size == 1 else None

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute; default where the program does not say it."""
        self._read.add(name)
        value = self.operation.attributes.get(name)
        return default if value is None else value

    def dtype(self, name: str, default: Any = None) -> np.dtype:
        """The dtype that an attribute has the number or name of; default where it says none (-1 or "")."""
        number = self.attribute(name, -1)
        if isinstance(number, str):
            dtype = dtypes.as_dtype(number) if number else default
        else:
            dtype = DTYPES.get(number, default)
        if dtype is None:
            raise CheckpointError(f"has {name}={number}, which is the number of no dtype")
        return dtype

    def ignore(self, *names: str) -> None:
        """Note that settings and inputs have no effect here, because of the values of others."""
        self._read.update(names)

    def check_all_was_read(self) -> None:
        """Raises CheckpointError for inputs and attributes that the op here was not given."""
        for slot, values in self._values.items():
            if values and slot not in self._read:
                raise CheckpointError(f"{self.operation}: has an input {slot}, which is not known here")
        for name, value in self.operation.attributes.items():
            unset = any(value is u or (type(value) is type(u) and value == u) for u in _UNSET)
            has_effect = name not in _NO_EFFECT and not name.startswith("@")  # notes for kernels
            if name not in self._read and has_effect and not unset:
                raise CheckpointError(f"{self.operation}: has {name}={value!r:.80}, which is not known here")

    def named(self, results: Results) -> dict[str, Value]:
        """Results by the names of variables."""
        by_slot = results if isinstance(results, Mapping) else {"Out": results}
        named: dict[str, Value] = {}
        for slot, values in by_slot.items():
            names = self.operation.outputs.get(slot, ())
            several: Sequence[Value] = values if isinstance(values, (list, tuple)) else [values]
            if len(names) > len(several):
                raise CheckpointError(f"{self.operation}: gives {len(several)} values in {slot}, not {len(names)}")
            named |= dict(zip(names, several, strict=False))
        return named


def as_tensor(value: Value) -> Tensor:
    """A Tensor as it is, an ndarray as a Tensor."""
    return value if isinstance(value, Tensor) else Tensor(jax.numpy.asarray(value))
