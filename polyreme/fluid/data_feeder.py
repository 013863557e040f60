"""DataFeeder: minibatches of samples as a feed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core.devices.place import as_place
from polyreme.core.state import TensorState
from polyreme.errors import DataError, DTypeError, ShapeError
from polyreme.fluid.framework import cpu_places, cuda_places
from polyreme.program.block import Variable
from polyreme.program.current import defaults
from polyreme.program.program import Program
from polyreme.sequences.lod_tensor import LoDTensor


def convert_dtype(dtype: Any) -> str:
    """The name of a dtype, such as "float32"."""
    return dtypes.as_dtype(dtype).name


def check_type(input: Any, input_name: str, expected_type: Any, op_name: str, extra_message: str = "") -> None:
    """Raise TypeError unless input is of a type, or of one of several."""
    if not isinstance(input, expected_type):
        kinds = expected_type if isinstance(expected_type, tuple) else (expected_type,)
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(
            f"{op_name}: {input_name} must be {wanted}, got {type(input).__name__}. {extra_message}".strip()
        )


def check_dtype(input_dtype: Any, input_name: str, expected_dtype: Any, op_name: str, extra_message: str = "") -> None:
    """Raise DTypeError unless a dtype is one of several names."""
    names = [expected_dtype] if isinstance(expected_dtype, str) else list(expected_dtype)
    if convert_dtype(input_dtype) not in names:
        found = convert_dtype(input_dtype)
        raise DTypeError(f"{op_name}: {input_name} is {found}, needs {' or '.join(names)}. {extra_message}".strip())


def check_variable_and_dtype(
    input: Any, input_name: str, expected_dtype: Any, op_name: str, extra_message: str = ""
) -> None:
    """Raise TypeError unless input is a Tensor or Variable, DTypeError unless its dtype is one of several names."""
    check_type(input, input_name, (TensorState,), op_name, extra_message)
    check_dtype(input.dtype, input_name, expected_dtype, op_name, extra_message)


class DataFeeder:
    """Makes {name: LoDTensor} of samples that have a part for each Variable of feed_list (Variables or names).

    A part is put into the Variable's shape where its rank is another: 784 numbers into [1, 28, 28], 3 into [1]. A
    Variable with lod_level takes a list of rows, with level 2 a list of those.
    """

    def __init__(self, feed_list: Sequence[Any], place: Any, program: Program | None = None) -> None:
        block = (defaults.main if program is None else program).global_block()
        self._variables: list[Any] = [block.var(v) if isinstance(v, str) else v for v in feed_list]
        if not all(isinstance(v, Variable) for v in self._variables):
            raise TypeError(f"DataFeeder: feed_list holds Variables and names, got {feed_list!r}")
        self._place = as_place(place)

    def feed(self, iterable: Iterable[Sequence[Any]]) -> dict[str, LoDTensor]:
        """The feed of one minibatch. Raises DataError for samples that have not one part for each Variable."""
        samples = [tuple(s) for s in iterable]
        if not samples:
            raise DataError("DataFeeder.feed: a minibatch of no samples")
        for sample in samples:
            if len(sample) != len(self._variables):
                names = [v.name for v in self._variables]
                raise DataError(f"DataFeeder.feed: a sample has {len(sample)} parts, feed_list {len(names)}: {names}")
        columns = zip(*samples, strict=True)
        return {v.name: self._tensor(v, list(c)) for v, c in zip(self._variables, columns, strict=True)}

    def feed_parallel(self, iterable: Iterable[Any], num_places: int | None = None) -> Iterator[dict[str, LoDTensor]]:
        """A feed for each of the minibatches in iterable, one a device."""
        batches = list(iterable)
        if num_places is not None and len(batches) != num_places:
            raise DataError(f"DataFeeder.feed_parallel: {len(batches)} minibatches for num_places={num_places}")
        return (self.feed(one) for one in batches)

    def decorate_reader(
        self, reader: Any, multi_devices: bool, num_places: int | None = None, drop_last: bool = True
    ) -> Any:
        """A reader of feeds for a reader of minibatches; with multi_devices, of lists with a feed for each device.

        drop_last: leave minibatches out that do not go round. Raises DataError for them otherwise.
        """
        if not multi_devices:
            return lambda: (self.feed(one) for one in reader())
        count = num_places or len(cpu_places() if self._place.is_cpu_place() else cuda_places())

        def feeds() -> Iterator[list[dict[str, LoDTensor]]]:
            group: list[Any] = []
            for one in reader():
                group.append(self.feed(one))
                if len(group) == count:
                    yield group
                    group = []
            if group and not drop_last:
                raise DataError(f"DataFeeder.decorate_reader: {len(group)} minibatches are left for {count} devices")

        return feeds

    def _tensor(self, variable: Variable, parts: list[Any]) -> LoDTensor:
        lengths: list[list[int]] = []
        for _ in range(variable.lod_level):
            lengths.append([len(p) for p in parts])
            parts = [row for p in parts for row in p]
        array, shape = np.asarray(parts, variable.dtype), [-1, *variable.shape[1:]]
        if array.ndim != len(shape):
            if min(shape[1:], default=0) < 0:
                raise ShapeError(
                    f"DataFeeder: {variable.name!r} has shape {list(variable.shape)}, a part {list(array.shape[1:])}; "
                    "it cannot be reshaped to sizes that are not known"
                )
            array = array.reshape(shape)
        made = LoDTensor()
        made.set(array, self._place)
        if lengths:
            made.set_recursive_sequence_lengths(lengths)
        return made


__all__ = ["DataFeeder", "check_dtype", "check_type", "check_variable_and_dtype", "convert_dtype"]
