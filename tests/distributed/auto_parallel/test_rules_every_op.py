"""Every row of the op tables on a mesh: whatever the placements, values and gradients are the dense ones."""

import numpy as np
import pytest

import polyreme
from polyreme.conformance.case import arrays, as_leaves, assert_close, flat, tensors, tensors_in
from polyreme.conformance.rows import ROWS
from polyreme.core import dtype as dtypes
from polyreme.core import rng
from polyreme.core.op import OPS
from polyreme.distributed import Partial, ProcessMesh, Replicate, Shard, shard_tensor

MESHES = (ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"]), ProcessMesh([0, 1, 2], dim_names=["x"]))
NO_ADDENDS = {"signbit", "copysign", "digamma-at_zero"}
"""Rows that see the sign of zero, which addends do not keep: -0.0 + 0.0 is 0.0."""
OWN_MESH = {"sharding_constraint", "relayout", "whole_over"}
"""Ops whose rows name a mesh of their own."""


def placed(tensor, mesh, draw, addends):
    choice = [Replicate(), Partial(), *(Shard(d) for d in range(tensor.ndim))]
    if tensor.dtype == dtypes.bool_ or not addends:  # truth values do not add up
        choice.pop(1)
    placements = [choice[draw.integers(len(choice))] for _ in range(mesh.ndim)]
    return shard_tensor(tensor, mesh, placements)


def spread(value, mesh, draw, addends):
    if isinstance(value, polyreme.Tensor):
        return placed(value, mesh, draw, addends)
    if isinstance(value, (list, tuple)):
        return type(value)(spread(v, mesh, draw, addends) for v in value)
    return value


def run(case, given):
    rng.seed(7)
    result = case.fn(*given, **tensors_in(case.kwargs))
    ends = [t for t in flat(result) if not t.stop_gradient and dtypes.is_floating(t.dtype)]
    if ends and not case.no_grad:
        polyreme.add_n([t.astype("float64").sum() for t in ends]).backward()
    return result


def check(case, seed):
    draw = np.random.default_rng(seed)
    mesh = MESHES[seed % 2]
    wants = not case.no_grad
    sides = [tensors(case.arguments()) for _ in range(2)]
    dense, on_mesh = map(as_leaves, sides) if wants else sides
    on_mesh = tuple(spread(v, mesh, draw, not {case.name, case.id} & NO_ADDENDS) for v in on_mesh)
    where = [t.placements for t in flat(on_mesh)]
    want, got = run(case, dense), run(case, on_mesh)
    if case.ref is not None:  # random ops draw other numbers
        # pieces add up in another order, and decompositions differ by more than that
        assert_close(arrays(got), arrays(want), 8 * case.terms)
        for x, y in zip(flat(on_mesh), flat(dense), strict=True):
            assert (x.grad is None) == (y.grad is None), where
            if x.grad is not None:
                assert_close([x.grad.numpy()], [y.grad.numpy()], 32 * case.terms)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [c for c in ROWS if hasattr(OPS[c.name], "op") and c.name not in OWN_MESH], ids=lambda c: c.id
)
def test_every_row_on_a_mesh(case):
    check(case, sum(case.id.encode()))
