"""Functions of one device's part, run on every device: values, gradients, ranks, collectives, what is refused."""

import copy

import numpy as np
import pytest

import polyreme
import polyreme.distributed as dist
from polyreme.distributed import LocalLayer, Partial, ProcessMesh, Replicate, Shard, local_map, shard_tensor
from polyreme.errors import CaptureError, ConfigError, PlacementError

R, P = Replicate(), Partial()
MESH = ProcessMesh([2, 3], dim_names=["x"])
GRID = ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
V = np.arange(8, dtype="float32").reshape(4, 2)


def put(values, mesh, placements):
    return shard_tensor(polyreme.to_tensor(values, stop_gradient=False), mesh, placements)


def test_a_function_of_the_part_and_the_rank():
    def masked_mean(x):
        mask = polyreme.zeros_like(x)
        if dist.get_rank() == 2:
            mask[1:3] = 1
        else:
            mask[4:5] = 1
        return (x * mask).sum() / mask.sum()

    x = put(np.arange(10, dtype="float32"), MESH, [Shard(0)])
    run = local_map(masked_mean, out_placements=[[P]], in_placements=[[Shard(0)]], process_mesh=MESH)
    y = run(x)
    assert y.placements == [P]
    assert [y._local_value(i).item() for i in (2, 3)] == [1.5, 9.0]
    assert y.item() == 10.5
    y.backward()
    assert x.grad.placements == [Shard(0)]
    np.testing.assert_array_equal(x.grad.numpy(), [0, 0.5, 0.5, 0, 0, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(run(x + 1).numpy(), 12.5)


def test_collectives_dense_tensors_and_other_values():
    weight = polyreme.to_tensor([[2.0, 0.0], [1.0, 1.0]], stop_gradient=False)

    def body(x, double):
        h = polyreme.matmul(x, weight)
        dist.all_reduce(h)
        return {"sum": h, "name": "h", "twice": x * 2 if double else x}

    x = put(V, MESH, [Shard(0)])
    out = local_map(body, out_placements=[[R], None, [Shard(0)]])(x, double=True)
    assert out["name"] == "h"
    np.testing.assert_array_equal(out["sum"].numpy(), (V[:2] + V[2:]) @ weight.numpy())
    np.testing.assert_array_equal(out["twice"].numpy(), 2 * V)
    (out["sum"].sum() + out["twice"].sum()).backward()
    np.testing.assert_array_equal(weight.grad.numpy(), np.tile(V.sum(0)[:, None], 2))
    np.testing.assert_array_equal(x.grad.numpy(), np.full_like(V, 4))


def test_two_mesh_dims_and_reshard_inputs():
    x = put(V, GRID, [Shard(1), R])
    wanted = [Shard(0), Shard(1)]
    with pytest.raises(PlacementError, match=r"lies as .*, in_placements says .*; reshard it, or pass reshard_inputs"):
        local_map(lambda v: v, [wanted], [wanted])(x)
    run = local_map(lambda v: v.max(), [[Partial(dist.ReduceType.kRedMax), P]], [wanted], reshard_inputs=True)
    y = run(x)
    assert y._local_value(1).item() == 3.0  # the larger of rows 0 and 1 in column 1
    assert y.item() == 6.0 + 7.0


class Halves(LocalLayer):
    def __init__(self, outs, grads):
        super().__init__(outs, grads)
        self.linear = polyreme.nn.Linear(2, 1, bias_attr=False)

    def forward(self, x):
        return polyreme.nn.functional.dropout(self.linear(x).sum(), 0.5, training=self.training)


def test_a_local_layer():
    layer = Halves([(MESH, [P])], [(MESH, [R])])
    layer.eval()
    x = put(V, MESH, [Shard(0)])
    y = layer(x)
    want = (V @ layer.linear.weight.numpy()).sum()
    np.testing.assert_allclose(y.item(), want, rtol=1e-5)  # 8 terms
    y.backward()
    assert x.grad.placements == [R]
    np.testing.assert_allclose(layer.linear.weight.grad.numpy()[:, 0], V.sum(0))
    np.testing.assert_allclose(polyreme.jit.to_static(lambda v: layer(v) * 2)(x).item(), 2 * want, rtol=1e-5)
    other = copy.deepcopy(layer)
    other.linear.weight.set_value(np.ones((2, 1), "float32"))
    assert other(x).item() == V.sum()
    other.train()
    drawn = {round(float(v), 3) for v in (other(x) for _ in range(8))}
    assert len(drawn) > 1  # the random generator moves on
    assert drawn <= {0.0, 12.0, 44.0, 56.0}
    assert not polyreme.rand([2]).is_dist()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: local_map(lambda v: v, [[R]])(polyreme.ones([2])), ConfigError, "no input lies on a mesh"),
        (lambda x: local_map(lambda v: v, [[R]], [[R], [R]])(x), ConfigError, "in_placements has 2 entries for 1"),
        (lambda x: local_map(lambda v: (v, v), [[R]])(x), ConfigError, "out_placements has 1 entries"),
        (lambda x: local_map(lambda v: v, [None])(x), ConfigError, "out_placements has 1 entries, 0 of them"),
        (
            lambda x: local_map(lambda v: v, [[R]])(put(V[:3], MESH, [Shard(0)])),
            PlacementError,
            "split unevenly over 2",
        ),
        (lambda x: local_map(lambda v: v * x.sum(1, keepdim=True)[:2], [[R]])(x), PlacementError, "pass it as an arg"),
        (lambda x: local_map(lambda a, b: a, [[R]])(x, put(V, GRID, [R])), PlacementError, "inputs lie on"),
        (
            lambda x: local_map(lambda a, b: a, [[R]], [None, [Shard(0)]])(x, polyreme.ones([2])),
            PlacementError,
            r"of shape \[2\] is dense, and is given whole; in_placements says \[Shard\(dim=0\)\]",
        ),
        (lambda x: LocalLayer([None], []), ConfigError, "out_dist_attrs must name one mesh"),
    ],
)
def test_misuse_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(put(V, MESH, [Shard(0)]))


def test_writes_to_tensors_outside_are_refused():
    kept = polyreme.zeros([])

    def body(x):
        kept.add_(x.sum())
        return x

    with pytest.raises(CaptureError, match=r"changes a Tensor of shape \[\] from outside"):
        local_map(body, [[Shard(0)]])(shard_tensor(V, MESH, [Shard(0)]))
