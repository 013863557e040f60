"""Dynamic axial parallelism: which axis of a Tensor the devices of `sep` split. Source: arXiv:2203.00854.

No value changes; each gradient goes the other way. Identities without a plan, and under one whose sep is 1.
"""

from __future__ import annotations

from typing import Any

from polyreme.core import layout as layouts
from polyreme.core.layout import Layout
from polyreme.distributed.tensor_parallel.constraints import one_dim_layout
from polyreme.errors import ConfigError, PlacementError
from polyreme.mesh import nearest_multiples
from polyreme.ops.layout import relayout

SEP = "sep"


def get_world_size() -> int:
    """1: a script has all parts of a Tensor."""
    return 1


def get_rank_in_group() -> int:
    """0: a script has all parts of a Tensor."""
    return 0


def set_dap_sync_op(sync_op: bool) -> None:
    """Does nothing for True, the only value in HelixFold too: XLA decides when to wait. ConfigError for others."""
    if sync_op is not True:
        raise ConfigError(f"dap.set_dap_sync_op: sync_op={sync_op!r}; give True, XLA decides when to wait")


def get_dap_sync_op() -> bool:
    """True."""
    return True


def scatter(input: Any, axis: int = -1) -> Any:
    """input split along an axis."""
    return _resplit("scatter", input, None, axis)


def gather(input: Any, axis: int = -1) -> Any:
    """input, which is split along an axis, whole on every device."""
    return _resplit("gather", input, axis, None)


def all_gather(input: Any, axis: int = -1) -> Any:
    """The same as gather; all_gather_opp, at which HelixFold waits for the result, has nothing left to do."""
    return _resplit("all_gather", input, axis, None)


def all_gather_opp(output: Any, axis: int = -1) -> Any:
    """The result of all_gather."""
    return output


def all_to_all(input: Any, in_axis: int, out_axis: int) -> Any:
    """input, which is split along out_axis, split along in_axis; all_to_all_opp has nothing left to do."""
    return _resplit("all_to_all", input, out_axis, in_axis)


def all_to_all_opp(output: Any, in_axis: int, out_axis: int) -> Any:
    """The result of all_to_all."""
    return output


def row_to_col(input: Any) -> Any:
    """[batch, rows, columns, width], split by rows, split by columns."""
    return _resplit("row_to_col", input, 1, 2)


def col_to_row(input: Any) -> Any:
    """[batch, rows, columns, width], split by columns, split by rows."""
    return _resplit("col_to_row", input, 2, 1)


def grad_sync(param_groups: Any) -> None:
    """Does nothing: gradients are sums over all devices already."""


def _resplit(what: str, x: Any, before: int | None, after: int | None) -> Any:
    """x, split along the axis before, split along the axis after; None: whole."""
    placed = layouts.active.layout
    if placed is None or placed.mesh.shape.get(SEP, 1) == 1:
        return x
    ways = placed.mesh.shape[SEP]
    for axis in (before, after):
        if axis is not None and x.shape[axis] % ways:
            raise PlacementError(
                f"dap.{what}: dim {axis} of shape {list(x.shape)} does not divide into {ways} equal parts over {SEP}; "
                f"make it {nearest_multiples(x.shape[axis], ways)}"
            )
    return relayout(x, _layout(placed, x, after, before), _layout(placed, x, before, after))


def _layout(placed: Layout, x: Any, axis: int | None, other: int | None) -> Any:
    """x split along axis, or, where that is None, whole along the other."""
    if axis is None:
        assert other is not None
        return one_dim_layout(placed, len(x.shape), other, ())
    return one_dim_layout(placed, len(x.shape), axis, (SEP,))
