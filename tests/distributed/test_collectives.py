"""Collectives in one process: a group of one, and groups of mesh axes over eight devices, against NumPy."""

import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyreme import distributed as dist
from polyreme import nn
from polyreme.autograd import PyLayer
from polyreme.distributed.communication import stream
from polyreme.distributed.communication.group import groups
from polyreme.distributed.communication.point_to_point import wires
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import CaptureError, ConfigError, DeviceError, DTypeError, PlacementError, ShapeError
from polyreme.jit import to_static

OPS = {
    dist.ReduceOp.SUM: np.sum,
    dist.ReduceOp.MAX: np.max,
    dist.ReduceOp.MIN: np.min,
    dist.ReduceOp.PROD: np.prod,
    dist.ReduceOp.AVG: np.mean,
}
# sums of four terms
TOLERANCE = 4 * 2.0**-23


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.asarray(jax.devices()).reshape(2, 4), ("dp", "mp"))


@pytest.fixture(scope="module")
def mp(mesh):
    return dist.axis_group(mesh, "mp")


@pytest.fixture(scope="module")
def both(mesh):
    return dist.axis_group(mesh, ("mp", "dp"))


def placed(mesh, value, *spec):
    return Tensor(jax.device_put(np.asarray(value, np.float32), NamedSharding(mesh, PartitionSpec(*spec))))


def values(*shape):
    return np.random.default_rng(5).uniform(0.5, 2.0, shape).astype(np.float32)


def locals_of(tensor):
    """What each device of the 2 x 4 mesh holds."""
    return {s.device.id: np.asarray(s.data) for s in tensor._array.addressable_shards}


class TestGroups:
    def test_one_process_is_rank_0_of_1_however_many_its_devices(self):
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "GLOO")
        assert dist.is_available()

    def test_init_parallel_env_makes_the_group_of_all(self):
        if dist.is_initialized():  # by a test of another file, in this process
            dist.destroy_process_group()
        assert not dist.is_initialized()
        group = dist.init_parallel_env()
        assert (group.ranks, group.rank, group.id) == ([0], 0, 0)
        assert dist.is_initialized()
        assert dist.get_group() is group is dist.init_parallel_env()
        dist.destroy_process_group()
        assert not dist.is_initialized()

    def test_the_same_by_the_names_with_gloo(self, monkeypatch):
        for name in ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_MASTER"):
            monkeypatch.setenv(name, "")
        dist.gloo_init_parallel_env(0, 1, "127.0.0.1:6170")
        assert dist.is_initialized()
        dist.gloo_barrier()
        dist.gloo_release()
        assert not dist.is_initialized()

    def test_parallel_env_says_what_the_launcher_said(self, monkeypatch):
        monkeypatch.setenv("PADDLE_TRAINER_ID", "3")
        monkeypatch.setenv("PADDLE_TRAINERS_NUM", "4")
        monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "a:1,b:2,c:3,d:4")
        monkeypatch.setenv("PADDLE_CURRENT_ENDPOINT", "d:4")
        env = dist.ParallelEnv()
        # as PaddlePaddle 3.3.1 answers: local_rank is another name for rank
        assert (env.rank, env.local_rank, env.world_size, env.nranks, env.nrings) == (3, 3, 4, 4, 1)
        assert (env.current_endpoint, env.trainer_endpoints) == ("d:4", ["a:1", "b:2", "c:3", "d:4"])
        assert (env.device_id, env.dev_id, env.device_type) == (0, 0, "cpu")

    def test_axis_group_lists_the_devices_that_differ_along_it(self, mesh, mp, both):
        assert (mp.ranks, mp.rank, mp.nranks, mp.axes) == ([0, 1, 2, 3], 0, 4, ("mp",))
        assert dist.axis_group(mesh, "dp").ranks == [0, 4]
        # in the mesh's order, however they are named
        assert (both.axes, both.ranks) == (("dp", "mp"), list(range(8)))
        assert (mp.get_group_rank(3), mp.get_group_rank(7), mp.get_global_rank(2), mp.get_global_rank(9)) == (
            3,
            -1,
            2,
            -1,
        )
        assert dist.get_group(mp.id) is mp
        assert (dist.get_rank(mp), dist.get_world_size(mp)) == (0, 4)

    def test_refuses_what_it_cannot_do(self, mesh):
        with pytest.raises(PlacementError, match="no mesh axis 'pp'"):
            dist.axis_group(mesh, "pp")
        with pytest.raises(PlacementError, match="at least one mesh axis, each once"):
            dist.axis_group(mesh, ())
        with pytest.raises(ConfigError, match=r"ranks=\[0, 1\] must be different ranks out of 0..0"):
            dist.new_group([0, 1])
        with pytest.raises(ConfigError, match="backend='nccl', but these devices talk through 'GLOO'"):
            dist.new_group([0], backend="nccl")
        with pytest.raises(ConfigError, match="XLA sets NCCL up by itself"):
            dist.new_group([0], nccl_comm_init_option=1)
        with pytest.raises(ConfigError, match="XLA sets NCCL up by itself"):
            dist.init_parallel_env(nccl_config={})
        with pytest.raises(ConfigError, match=r"timeout must be a datetime.timedelta, got 30"):
            dist.new_group([0], timeout=30)
        with pytest.raises(ConfigError, match="group must come from new_group"):
            dist.all_reduce(to_tensor([1.0]), group="mp")
        gone = dist.new_group([0])
        dist.destroy_process_group(gone)
        with pytest.raises(ConfigError, match="was destroyed"):
            dist.barrier(gone)
        with pytest.raises(ConfigError, match="there is no group"):
            dist.destroy_process_group(gone)
        with pytest.warns(UserWarning, match="Group 999 is not initialized"):
            assert dist.get_group(999) is None

    def test_several_processes_must_meet_first(self, monkeypatch):
        x, mesh = to_tensor([1.0]), dist.ProcessMesh([0])
        for name, value in (("TRAINERS_NUM", "2"), ("TRAINER_ID", "1"), ("MASTER", "127.0.0.1:9")):
            monkeypatch.setenv(f"PADDLE_{name}", value)
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        monkeypatch.setattr(groups, "by_id", {})  # another test may have joined a world of one
        late = (
            "rank 1 has to join the others first, and a device is in use already.*call .*init_parallel_env.* at the top"
        )
        with pytest.raises(ConfigError, match=f"all_reduce: {late}"):
            dist.all_reduce(x)
        with pytest.raises(ConfigError, match=f"DataParallel: {late}"):
            dist.DataParallel(nn.Linear(1, 1))
        assert dist.ProcessMesh([0, 1]).shape == [2]  # describes one; a Tensor on it is what needs the others
        with pytest.raises(ConfigError, match=f"process_ids .0.*: {late}"):
            dist.shard_tensor(x, mesh, [dist.Replicate()])


class TestGroupOfOne:
    def test_everything_comes_back_as_it_was(self):
        x, y = to_tensor([1.0, 2.0]), to_tensor([3.0, 4.0])
        task = dist.all_reduce(x, sync_op=False)
        assert task.wait() is True
        assert task.is_completed()
        dist.broadcast(x, 0)
        dist.reduce(x, 0, dist.ReduceOp.MAX)
        assert x.tolist() == [1.0, 2.0]
        out = []
        dist.all_gather(out, x)
        dist.gather(x, out, 0)
        assert [t.tolist() for t in out] == [[1.0, 2.0]]
        for fill in (dist.scatter, dist.reduce_scatter):
            fill(y, [x])
            assert y.tolist() == [1.0, 2.0]
        dist.alltoall_single(y, to_tensor([5.0, 6.0]), [2], [2])
        assert y.tolist() == [5.0, 6.0]
        objects = []
        dist.all_gather_object(objects, {"a": (1, None)})
        dist.broadcast_object_list(objects, 0)
        picked = []
        dist.scatter_object_list(picked, objects, 0)
        assert picked == objects == [{"a": (1, None)}]
        dist.barrier()
        dist.wait(y)

    def test_refuses_what_it_cannot_do(self):
        x = to_tensor([1.0, 2.0])
        with pytest.raises(TypeError, match="needs Tensors, got list"):
            dist.all_reduce([1.0])
        with pytest.raises(ConfigError, match=r"op=9 is none of ReduceOp.SUM"):
            dist.all_reduce(x, 9)
        with pytest.raises(DTypeError, match="the mean of int64 is not int64"):
            dist.all_reduce(to_tensor([1, 2]), dist.ReduceOp.AVG)
        with pytest.raises(DTypeError, match="complex64 has no order"):
            dist.all_reduce(to_tensor([1j]), dist.ReduceOp.MAX)
        for bad in (-1, 1):
            with pytest.raises(ConfigError, match=rf"src={bad} is not in group _default_pg, whose ranks are \[0\]"):
                dist.broadcast(x, bad)
        with pytest.raises(ConfigError, match="dst must be a rank, a whole number, got '0'"):
            dist.reduce(x, "0")
        with pytest.raises(ConfigError, match="dst=0 is this rank itself"):
            dist.send(x, 0)
        with pytest.raises(ConfigError, match="src=None; name the rank that sends"):
            dist.irecv(x)
        with pytest.raises(ConfigError, match=r"op must be distributed.isend or"):
            dist.P2POp(dist.send, x, 0)
        with pytest.raises(ConfigError, match="at least one P2POp"):
            dist.batch_isend_irecv([])
        with pytest.raises(ConfigError, match="use_calc_stream=True goes with sync_op=True"):
            stream.all_reduce(x, sync_op=False, use_calc_stream=True)
        with pytest.raises(ConfigError, match="exactly one of dst"):
            dist.send_object_list([1])
        with pytest.raises(DTypeError, match="all_gather_object: the object is a object; only dicts"):
            dist.all_gather_object([], object())
        with pytest.raises(DeviceError, match="send: messages between ranks go through the processor's memory"):
            wires.check("send")
        with pytest.raises(TypeError, match="needs a list to put objects into, got tuple"):
            dist.all_gather_object((), 1)

    def test_lists_and_shapes_that_do_not_fit(self):
        x = to_tensor([1.0, 2.0])
        with pytest.raises(ConfigError, match="holds 2 Tensors, group _default_pg has 1 members"):
            dist.all_gather([x, x], x)
        with pytest.raises(TypeError, match="must be a list or a Tensor, got tuple"):
            dist.all_gather((), x)
        with pytest.raises(ConfigError, match="got a list of 2 Tensors, group _default_pg has 1 members"):
            dist.reduce_scatter(x, [x, x])
        with pytest.raises(ConfigError, match="needs tensor_list, the 1 Tensors to hand out"):
            dist.scatter(x, None)
        with pytest.raises(ShapeError, match=r"each entry has shape \[3\], the Tensor for the result \[2\]"):
            dist.scatter(x, [to_tensor([1.0, 2.0, 3.0])])
        with pytest.raises(DTypeError, match="the Tensor for the result is float32, the input int64"):
            dist.reduce_scatter(x, [to_tensor([1, 2])])
        with pytest.raises(
            ShapeError, match=r"in_split_sizes=\[3\] must be 1 row counts that add up to dim 0 of \[2\]"
        ):
            dist.alltoall_single(x, to_tensor([1.0, 2.0]), [3], [2])
        with pytest.raises(ConfigError, match="gather_list="):
            dist.gather(x)


class TestAxisGroups:
    @pytest.mark.parametrize("op", OPS)
    def test_all_reduce_joins_the_pieces_of_each_group(self, mesh, mp, op):
        value = values(4, 8)
        tensor = placed(mesh, value, "dp", "mp")
        dist.all_reduce(tensor, op, mp)
        # a device's piece is 2 rows of one dp member, 2 columns of one mp member
        joined = OPS[op](value.reshape(2, 2, 4, 2), axis=2)
        assert tensor.shape == [4, 8]
        for device, piece in locals_of(tensor).items():
            np.testing.assert_allclose(piece, joined[device // 4], rtol=TOLERANCE)

    def test_all_reduce_of_a_whole_tensor_multiplies(self, mp):
        tensor = to_tensor(values(3))
        dist.all_reduce(tensor, group=mp)
        np.testing.assert_allclose(tensor.numpy(), 4 * values(3), rtol=TOLERANCE)

    def test_all_gather_lists_the_members_pieces(self, mesh, mp, both):
        value = values(4, 8)
        out = []
        dist.all_gather(out, placed(mesh, value, "dp", "mp"), mp)
        assert [t.shape for t in out] == [[4, 2]] * 4
        np.testing.assert_array_equal(np.concatenate([t.numpy() for t in out], 1), value)
        out = []
        dist.all_gather(out, placed(mesh, value.reshape(32), ("dp", "mp")), both)
        np.testing.assert_array_equal(np.concatenate([t.numpy() for t in out]), value.reshape(32))

    def test_all_gather_writes_given_tensors_or_one(self, mesh, mp):
        value = values(8)
        out = [to_tensor(np.zeros(2, "float32")) for _ in range(4)]
        first = out[0]
        dist.all_gather(out, placed(mesh, value, "mp"), mp)
        assert out[0] is first
        np.testing.assert_array_equal(np.concatenate([t.numpy() for t in out]), value)
        whole = to_tensor(np.zeros(8, "float32"))
        stream.all_gather(whole, placed(mesh, value, "mp"), mp)
        np.testing.assert_array_equal(whole.numpy(), value)

    @pytest.mark.parametrize("kind", ["broadcast", "reduce"])
    def test_one_member_rules(self, mesh, mp, kind):
        value = values(2, 8)
        value[0, 4:6] = [np.nan, -0.0]
        tensor = placed(mesh, value, "dp", "mp")
        getattr(dist, kind)(tensor, 2, group=mp)
        pieces = value.reshape(2, 4, 2)
        for device, piece in locals_of(tensor).items():
            row, column = divmod(device, 4)
            want = pieces[row, 2] if kind == "broadcast" else pieces[row].sum(0) if column == 2 else pieces[row, column]
            np.testing.assert_allclose(piece[0], want, rtol=TOLERANCE)
            if kind == "broadcast":
                np.testing.assert_array_equal(np.signbit(piece[0]), np.signbit(want))

    def test_broadcast_keeps_bits_of_every_dtype(self, mp):
        for data in ([True, False], [1 + 2j, -0.0j], np.array([-1, 2], "int8"), np.array([0.1, -0.0])):
            tensor = to_tensor(data)
            before = tensor.numpy()
            dist.broadcast(tensor, 3, mp)
            assert tensor.numpy().dtype == before.dtype
            np.testing.assert_array_equal(tensor.numpy(), before)

    @pytest.mark.parametrize("op", OPS)
    def test_reduce_scatter_lays_results_along_dim_0(self, mp, op):
        entries = values(4, 3)
        out = to_tensor(np.zeros(12, "float32"))
        dist.reduce_scatter(out, [to_tensor(e) for e in entries], op, mp)
        # every member gave the same list
        want = OPS[op](np.stack([entries] * 4), axis=0).reshape(12)
        np.testing.assert_allclose(out.numpy(), want, rtol=TOLERANCE)
        whole = to_tensor(np.zeros(12, "float32"))
        dist.reduce_scatter(whole, to_tensor(entries.reshape(12)), op, mp)
        np.testing.assert_allclose(whole.numpy(), want, rtol=TOLERANCE)

    def test_truth_values_reduce(self, mesh, mp):
        value = np.array([True, False, False, False, False, False, False, False])
        for op, want in ((dist.ReduceOp.SUM, True), (dist.ReduceOp.MIN, False), (dist.ReduceOp.PROD, False)):
            tensor = Tensor(jax.device_put(value, NamedSharding(mesh, PartitionSpec("mp"))))
            dist.all_reduce(tensor, op, mp)
            assert tensor.numpy().tolist() == [want, False] * 4

    def test_alltoall_is_the_transpose_of_members_and_entries(self, mesh, mp):
        value = values(4, 8)
        entries = [placed(mesh, row, "mp") for row in value]
        out = []
        dist.alltoall(out, entries, mp)
        # member i got the i-th entry's piece of member j as its entry j
        want = value.reshape(4, 4, 2)
        for j, tensor in enumerate(out):
            np.testing.assert_array_equal(tensor.numpy().reshape(4, 2), want[:, j])
        single = to_tensor(np.zeros(32, "float32"))
        dist.alltoall_single(single, placed(mesh, value.reshape(32), "mp"), group=mp)
        np.testing.assert_array_equal(single.numpy(), value.reshape(4, 4, 2).swapaxes(0, 1).reshape(32))
        again = to_tensor(np.zeros(32, "float32"))
        stream.alltoall(again, placed(mesh, value.reshape(32), "mp"), mp)
        np.testing.assert_array_equal(again.numpy(), single.numpy())

    def test_scatter_and_gather(self, mesh, mp):
        entries = values(4, 2)
        out = to_tensor(np.zeros(8, "float32"))
        dist.scatter(out, [to_tensor(e) for e in entries], 1, mp)
        np.testing.assert_array_equal(out.numpy(), entries.reshape(8))
        dist.scatter(out, to_tensor(entries.reshape(8)), 1, mp)
        np.testing.assert_array_equal(out.numpy(), entries.reshape(8))
        back = []
        dist.gather(out, back, 3, mp)
        np.testing.assert_array_equal(np.stack([t.numpy() for t in back]), entries)

    def test_a_stage_of_a_pipeline_is_its_own_mesh(self, mesh):
        group = dist.axis_group(Mesh(np.asarray(jax.devices()).reshape(2, 4), ("pp", "mp")), "mp")
        stage = Mesh(np.asarray(jax.devices()[4:]), ("mp",))
        tensor = Tensor(jax.device_put(np.arange(4.0, dtype="float32"), NamedSharding(stage, PartitionSpec("mp"))))
        dist.all_reduce(tensor, group=group)
        assert tensor.numpy().tolist() == [6.0] * 4
        assert {d.id for d in tensor._array.devices()} == {4, 5, 6, 7}

    def test_objects_belong_to_the_processes_of_the_devices(self, mp):
        objects = []
        dist.all_gather_object(objects, "x", mp)
        assert objects == ["x"] * 4
        dist.broadcast_object_list(objects, 3, mp)
        picked = []
        dist.scatter_object_list(picked, ["a", "b", "c", "d"], 2, mp)
        assert picked == ["a"]
        dist.barrier(mp)

    def test_refuses_what_it_cannot_do(self, mesh, mp):
        x = to_tensor(np.ones(6, "float32"))
        with pytest.raises(ShapeError, match=r"shape \[6\] cannot be cut along dim 0 into 4 equal pieces"):
            dist.alltoall_single(x, x, group=mp)
        with pytest.raises(ShapeError, match="2 rows on each device, which 4 members"):
            dist.alltoall_single(x, placed(mesh, np.ones(8), "mp"), group=mp)
        with pytest.raises(ShapeError, match=r"result has shape \[24\], the Tensor given for it \[6\].*global"):
            dist.reduce_scatter(x, [x] * 4, group=mp)
        with pytest.raises(ShapeError, match="a 0-D Tensor has no dim"):
            dist.scatter(to_tensor(1.0), [to_tensor(1.0)] * 4, 0, mp)
        with pytest.raises(ConfigError, match="leave the split sizes out"):
            dist.alltoall_single(x, x, [3, 1, 1, 1], [3, 1, 1, 1], mp)
        with pytest.raises(PlacementError, match="one process drives all their devices"):
            dist.send(x, 1, mp)
        with pytest.raises(ConfigError, match=r"src=5 is not in group .* \[0, 1, 2, 3\]"):
            dist.broadcast(x, 5, mp)
        with pytest.raises(ShapeError, match=r"entry 1 is float32\[2\], entry 0 is float32\[6\]"):
            dist.alltoall([], [x, to_tensor([1.0, 2.0]), x, x], mp)


class TestInsidePrograms:
    def test_captured_is_eager(self, mp):
        def total(x):
            y = x * 2
            dist.all_reduce(y, group=mp)
            parts = []
            dist.all_gather(parts, x, mp)
            return y, parts[3]

        x = to_tensor(values(3))
        captured, eager = to_static(total)(x), total(x)
        for got, want in zip(captured, eager, strict=True):
            np.testing.assert_array_equal(got.numpy(), want.numpy())

    def test_in_a_py_layer_it_has_the_gradient_written_there(self, mesh, mp):
        class SumOverMp(PyLayer):
            @staticmethod
            def forward(ctx, x):
                y = x.clone()
                dist.all_reduce(y, group=mp)
                return y

            @staticmethod
            def backward(ctx, gradient):
                back = gradient.clone()
                dist.all_reduce(back, group=mp)
                return back

        x = placed(mesh, np.arange(8.0), "mp")
        x.stop_gradient = False
        weight = values(8)
        (SumOverMp.apply(x) * placed(mesh, weight, "mp")).sum().backward()
        np.testing.assert_allclose(x.grad.numpy(), np.tile(weight.reshape(4, 2).sum(0), 4), rtol=TOLERANCE)

    def test_in_place_it_is_not_taped(self, mp):
        # as PaddlePaddle 3.3.1 does: the gradient passes as if the collective were not there
        x = to_tensor([1.0, 2.0], stop_gradient=False)
        y = x * 3
        dist.all_reduce(y, group=mp)
        y.sum().backward()
        assert (y.tolist(), x.grad.tolist()) == ([12.0, 24.0], [3.0, 3.0])

    def test_unshard_gives_every_device_the_whole_and_a_gradient_back(self, mesh):
        # axes of no ProcessMesh: while an equal one is alive, x is a Tensor on it
        x = placed(Mesh(mesh.devices, ("row", "column")), np.arange(8.0), "column")
        x.stop_gradient = False
        whole = dist.unshard_dtensor(x)
        assert {p.shape for p in locals_of(whole).values()} == {(8,)}
        (whole * whole).sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), 2 * np.arange(8.0))
        alone = to_tensor([1.0])
        assert dist.unshard_dtensor(alone) is alone
        with pytest.raises(CaptureError, match="unshard_dtensor inside a captured function"):
            to_static(dist.unshard_dtensor)(x.detach())
        with pytest.raises(TypeError, match="takes a Tensor, got list"):
            dist.unshard_dtensor([1.0])
