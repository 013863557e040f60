"""Variables made of nothing: constants, random numbers, parameters and counters; and copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.core import state, unique_name
from polyreme.core.rng import fixed_key
from polyreme.core.state import TensorState
from polyreme.errors import ConfigError
from polyreme.fluid.layer import layer, one
from polyreme.fluid.layers.elementwise import put
from polyreme.fluid.mode import begin
from polyreme.nn.initializer import Constant
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import ParamAttr
from polyreme.ops import arithmetic as ar
from polyreme.ops import creation as cr
from polyreme.ops import math as mt
from polyreme.ops import random as rn
from polyreme.ops import reduce as rd
from polyreme.ops import search
from polyreme.ops.manipulation import concat as joined
from polyreme.ops.manipulation import flip
from polyreme.ops.repetition import tile
from polyreme.program.block import Variable
from polyreme.program.current import defaults
from polyreme.program.parameters import LayerParameters
from polyreme.sequences import lod as lods
from polyreme.static import variables


@layer
def fill_constant(shape: Any, dtype: Any, value: Any, force_cpu: bool = False, out: Any = None) -> Any:
    """value everywhere, of this shape (ints, or Variables among them); written into out if that is given.

    force_cpu: the value does not depend on where it is made.
    """
    made = cr.full(shape, float(value) if isinstance(value, str) else value, dtype)
    return made if out is None else put(out, made, "fill_constant")


def _like(input: Any, shape: Sequence[int], from_dim: int, to_dim: int) -> list[Any]:
    sizes = list(shape)
    sizes[to_dim] = input.shape[from_dim]
    return sizes


@layer
def fill_constant_batch_size_like(
    input: Any, shape: Sequence[int], dtype: Any, value: float, input_dim_idx: int = 0, output_dim_idx: int = 0,
    force_cpu: bool = False,
) -> Any:  # fmt: skip
    """value everywhere, of this shape with dim output_dim_idx as large as input's dim input_dim_idx."""
    return cr.full(_like(input, shape, input_dim_idx, output_dim_idx), value, dtype)


@layer
def ones(shape: Any, dtype: Any, force_cpu: bool = False) -> Any:
    """1 everywhere."""
    return cr.ones(shape, dtype)


@layer
def zeros(shape: Any, dtype: Any, force_cpu: bool = False) -> Any:
    """0 everywhere."""
    return cr.zeros(shape, dtype)


@layer
def zeros_like(x: Any, out: Any = None) -> Any:
    """0 everywhere, of x's shape and dtype; written into out if that is given."""
    return cr.zeros_like(x) if out is None else put(out, cr.zeros_like(x), "zeros_like")


@layer
def ones_like(x: Any, out: Any = None) -> Any:
    """1 everywhere, of x's shape and dtype; written into out if that is given."""
    return cr.ones_like(x) if out is None else put(out, cr.ones_like(x), "ones_like")


@layer
def range(start: Any, end: Any, step: Any, dtype: Any) -> Any:
    """start, start + step, ... below end."""
    return cr.arange(start, end, step, dtype)


@layer
def linspace(start: Any, stop: Any, num: Any, dtype: Any) -> Any:
    """num numbers from start to stop, both included."""
    return cr.linspace(start, stop, num, dtype)


@layer
def diag(diagonal: Any) -> Any:
    """A matrix with this diagonal, a Variable or array [n], and 0 elsewhere."""
    return cr.diag(assign(diagonal))


@layer
def eye(
    num_rows: int, num_columns: int | None = None, batch_shape: Sequence[int] | None = None, dtype: Any = "float32"
) -> Any:
    """The identity matrix, repeated over batch_shape if that is given."""
    made = cr.eye(num_rows, num_columns, dtype)
    return made if not batch_shape else tile(made, [*batch_shape, 1, 1])


@layer
def cast(x: Any, dtype: Any) -> Any:
    """x in another dtype."""
    return ar.cast(x, dtype)


@layer
def concat(input: Any, axis: Any = 0, name: str | None = None) -> Any:
    """Variables one behind the other along axis."""
    return joined(list(input) if isinstance(input, (list, tuple)) else [input], axis)


@layer
def assign(input: Any, output: Any = None) -> Any:
    """A copy of a Variable or an ndarray; written into output if that is given, which then has input's sequences.

    Raises TypeError for anything else.
    """
    if not isinstance(input, (TensorState, np.ndarray)):
        raise TypeError(f"fluid.layers.assign takes a Variable or an ndarray, got {type(input).__name__}")
    made = cr.assign(input)
    if output is None:
        return made
    put(output, made, "assign")
    if isinstance(output, Variable) and not output.persistable:
        lods.rebind("assign", output, input)
    return output


@layer
def merge_selected_rows(x: Any, name: str | None = None) -> Any:
    """A copy of x: a gradient of rows has one value a row already, and is dense here."""
    return cr.assign(x)


@layer
def get_tensor_from_selected_rows(x: Any, name: str | None = None) -> Any:
    """A copy of x, which is dense here."""
    return cr.assign(x)


@layer
def argmin(x: Any, axis: int = 0) -> Any:
    """Where the smallest elements along axis are, int64."""
    return search.argmin(x, axis)


@layer
def argmax(x: Any, axis: int = 0) -> Any:
    """Where the largest elements along axis are, int64."""
    return search.argmax(x, axis)


@layer
def argsort(input: Any, axis: int = -1, descending: bool = False, name: str | None = None) -> tuple[Any, Any]:
    """(sorted along axis, where each element was)."""
    return search.sort(input, axis, descending), search.argsort(input, axis, descending)


@layer
def reverse(x: Any, axis: Any) -> Any:
    """x from back to front along axis, an int or several."""
    return flip(x, axis)


@layer
def has_inf(x: Any) -> Any:
    """Whether an element is infinite, [1]."""
    return one(rd.any(mt.isinf(x)))


@layer
def has_nan(x: Any) -> Any:
    """Whether an element is not a number, [1]."""
    return one(rd.any(mt.isnan(x)))


@layer
def isfinite(x: Any) -> Any:
    """Whether all elements are finite, [1]."""
    return one(rd.all(mt.isfinite(x)))


# random


@layer
def uniform_random(shape: Any, dtype: Any = "float32", min: float = -1.0, max: float = 1.0, seed: int = 0) -> Any:
    """Uniform in [min, max); with a seed the same numbers in each run."""
    return rn.uniform(shape, dtype, min, max, seed)


@layer
def gaussian_random(shape: Any, mean: float = 0.0, std: float = 1.0, seed: int = 0, dtype: Any = "float32") -> Any:
    """Gaussian; with a seed the same numbers in each run."""
    return rn.gaussian(shape, mean, std, seed, dtype)


@layer
def uniform_random_batch_size_like(
    input: Any, shape: Sequence[int], dtype: Any = "float32", input_dim_idx: int = 0, output_dim_idx: int = 0,
    min: float = -1.0, max: float = 1.0, seed: int = 0,
) -> Any:  # fmt: skip
    """uniform_random with dim output_dim_idx as large as input's dim input_dim_idx."""
    return rn.uniform(_like(input, shape, input_dim_idx, output_dim_idx), dtype, min, max, seed)


@layer
def gaussian_random_batch_size_like(
    input: Any, shape: Sequence[int], input_dim_idx: int = 0, output_dim_idx: int = 0, mean: float = 0.0,
    std: float = 1.0, seed: int = 0, dtype: Any = "float32",
) -> Any:  # fmt: skip
    """gaussian_random with dim output_dim_idx as large as input's dim input_dim_idx."""
    return rn.gaussian(_like(input, shape, input_dim_idx, output_dim_idx), mean, std, seed, dtype)


@layer
def sampling_id(x: Any, min: float = 0.0, max: float = 1.0, seed: int = 0, dtype: Any = "float32") -> Any:
    """For each row of probabilities [n, classes] a class drawn by them, [n]."""
    if (min, max) != (0.0, 1.0):
        raise ConfigError(f"fluid.layers.sampling_id: min={min}, max={max}; rows are drawn from with numbers in [0, 1)")
    return ar.cast(rn.multinomial(x, 1, True, **fixed_key(seed)).reshape([-1]), dtype)


# what outlives a run


@layer
def create_tensor(dtype: Any, name: str | None = None, persistable: bool = False) -> Any:
    """A Variable to be written into by assign(output=), fill_constant(out=) or sums(out=).

    Raises ConfigError for persistable=True, which needs a shape: create_global_var.
    """
    if persistable:
        raise ConfigError("fluid.layers.create_tensor: persistable=True needs a shape; use create_global_var")
    return defaults.block.create_var(name or unique_name.generate("create_tensor"), (), dtype)


@layer
def create_parameter(
    shape: Sequence[int], dtype: Any, name: str | None = None, attr: Any = None, is_bias: bool = False,
    default_initializer: Any = None,
) -> Any:  # fmt: skip
    """A trained Variable, in dygraph a Parameter: Xavier-uniform by default, zeros for a bias."""
    if attr is None and name is not None:
        attr = ParamAttr(name=name)
    if not state.recording():
        return Layer("create_parameter", dtype).create_parameter(shape, attr, dtype, is_bias, default_initializer)
    return LayerParameters("create_parameter").parameter(attr, shape, dtype, default_initializer, is_bias)


def create_global_var(
    shape: Sequence[int], value: float, dtype: Any, persistable: bool = False, force_cpu: bool = False,
    name: str | None = None,
) -> Any:  # fmt: skip
    """A Variable: set to value by the startup Program and keeping what is assigned to it, if persistable;
    else one that is value at the start of every run, and of which an assignment may change the shape.
    """
    begin()
    name = name or unique_name.generate("_generated_var")
    if not persistable:
        return variables.create_global_var(shape, value, dtype, name=name)
    return global_variable(name, shape, dtype, value)


def global_variable(name: str, shape: Sequence[int], dtype: Any, value: float) -> Any:
    """The persistable Variable of this name; made, and set to value by the startup Program, if there is none."""
    main, startup = defaults.main.global_block(), defaults.startup.global_block()
    if name in main.vars:
        return main.vars[name]
    variable = main.create_var(name, shape, dtype, persistable=True)
    if name in startup.vars:
        return variable
    del main.vars[name]
    state.require_recorder(f"variable {name!r}").declare(name, variable, Constant(value))
    return variable


@layer
def autoincreased_step_counter(counter_name: str | None = None, begin: int = 1, step: int = 1) -> Any:
    """begin at the first run, and step more at each one after it; int64 [1], one counter a name."""
    name = counter_name or "@STEP_COUNTER@"
    known = name in defaults.main.global_block().vars
    counter = global_variable(name, [1], "int64", begin - step)
    return counter if known else put(counter, ar.add(counter, step), "autoincreased_step_counter")


__all__ = [
    "argmax", "argmin", "argsort", "assign", "autoincreased_step_counter", "cast", "concat", "create_global_var",
    "create_parameter", "create_tensor", "diag", "eye", "fill_constant", "fill_constant_batch_size_like",
    "gaussian_random", "gaussian_random_batch_size_like", "get_tensor_from_selected_rows", "has_inf", "has_nan",
    "isfinite", "linspace", "merge_selected_rows", "ones", "ones_like", "range", "reverse", "sampling_id",
    "uniform_random", "uniform_random_batch_size_like", "zeros", "zeros_like",
]  # fmt: skip
