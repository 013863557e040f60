"""fluid.layers.data, and the Variables that loaders feed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.core import unique_name
from polyreme.core.devices.place import is_compiled_with_cuda
from polyreme.errors import ConfigError
from polyreme.fluid.layer import layer
from polyreme.fluid.mode import begin
from polyreme.fluid.reader import PyReader
from polyreme.program import mode
from polyreme.program.block import Variable
from polyreme.static.places import cpu_places, cuda_places


def data(
    name: str, shape: Sequence[int | None], append_batch_size: bool = True, dtype: Any = "float32", lod_level: int = 0,
    type: Any = "lod_tensor", stop_gradient: bool = True,
) -> Variable:  # fmt: skip
    """A Variable that is fed, with the batch in front of shape.

    append_batch_size: False, like a None or negative size in shape, takes shape as it is. What is fed is checked, as
    that of fluid.data is. Raises ConfigError for another type than a tensor, and for an append_batch_size that is no
    truth value, such as a dtype in its place.
    """
    if type != "lod_tensor":
        raise ConfigError(f"fluid.layers.data({name!r}): type={type!r}; what is fed is a tensor")
    if append_batch_size not in (True, False):
        raise ConfigError(
            f"fluid.layers.data({name!r}): append_batch_size={append_batch_size!r}; True or False stands behind shape, "
            f"a dtype is named: data({name!r}, {shape!r}, dtype='int64')"
        )
    sizes = [shape] if isinstance(shape, int) else list(shape)
    whole = not append_batch_size or any(s is None or s < 0 for s in sizes)
    begin()
    made = mode.data(name, sizes if whole else [-1, *sizes], dtype, lod_level)
    made.stop_gradient = stop_gradient
    return made


@layer
def py_reader(
    capacity: int, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any], lod_levels: Sequence[int] | None = None,
    name: str | None = None, use_double_buffer: bool = True,
) -> PyReader:  # fmt: skip
    """A reader with a Variable for each of shapes, which read_file gives, and whose batches the Program reads.

    Set by decorate_paddle_reader or decorate_tensor_provider, it is started, read by every Executor.run until
    EOFException, and reset. capacity: how many batches are read ahead. Raises ConfigError unless there is a dtype, and
    a level if any, for each shape.
    """
    levels = [0] * len(shapes) if lod_levels is None else list(lod_levels)
    if not len(shapes) == len(dtypes) == len(levels):
        raise ConfigError(
            f"fluid.layers.py_reader: {len(shapes)} shapes, {len(dtypes)} dtypes, {len(levels)} lod_levels; as many"
        )
    base = name or unique_name.generate("py_reader")
    variables = [
        mode.data(f"{base}_{i}", list(shape), dtype, level)
        for i, (shape, dtype, level) in enumerate(zip(shapes, dtypes, levels, strict=True))
    ]
    return PyReader(variables, capacity, use_double_buffer, iterable=False)


@layer
def create_py_reader_by_data(
    capacity: int, feed_list: Sequence[Any], name: str | None = None, use_double_buffer: bool = True
) -> PyReader:
    """py_reader of Variables that data() made."""
    return PyReader(feed_list, capacity, use_double_buffer, iterable=False)


def read_file(reader: PyReader) -> Any:
    """The Variables of a py_reader: one, or a list of several."""
    variables = reader.variables
    return variables[0] if len(variables) == 1 else variables


def double_buffer(reader: PyReader, place: Any = None, name: str | None = None) -> PyReader:
    """reader: batches are read ahead as far as its capacity goes, and the compiled step takes them to its device."""
    return reader


def get_places(device_count: int | None = None, device_type: str | None = None) -> list[Any]:
    """Places of device_type "CPU" or "CUDA", that of the machine if None: device_count of them, or all.

    Raises ConfigError for another type.
    """
    kind = (device_type or ("CUDA" if is_compiled_with_cuda() else "CPU")).upper()
    if kind not in ("CPU", "CUDA"):
        raise ConfigError(f"fluid.layers.get_places: device_type={device_type!r}; 'CPU' or 'CUDA'")
    return cpu_places(device_count) if kind == "CPU" else cuda_places()[:device_count]


__all__ = ["create_py_reader_by_data", "data", "double_buffer", "get_places", "py_reader", "read_file"]
