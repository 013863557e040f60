"""Collectives, messages and DataParallel between real processes, against NumPy and against one process.

One job of three processes makes all checks, each named like the test that reads its outcome: starting them is what
takes the time.
"""

import json
import os
import traceback
from pathlib import Path

import numpy as np
import pytest

SIZE = 3
DEVICES = 2  # of each process
OPS = {"SUM": np.sum, "MAX": np.max, "MIN": np.min, "PROD": np.prod, "AVG": np.mean}
# seconds; alone on two cores the job takes about fifteen, on a busy machine ten times that, and pytest stops at 300
LIMIT = 240


def values(seed, *shape):
    return np.random.default_rng(seed).uniform(0.5, 2.0, shape).astype(np.float32)


def job(folder):
    """What each process does: every check, its outcome written down as it ends."""
    from polyreme import distributed as dist  # noqa: PLC0415  (each rank's environment is set by now)

    dist.barrier()  # the first collective joins the processes
    rank = dist.get_rank()
    outcomes = {}
    for name, check in CHECKS.items():
        try:
            check(rank)
            outcomes[name] = "passed"
        except Exception:  # noqa: BLE001  (whatever went wrong is the outcome)
            outcomes[name] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))
        # a check that failed on one rank may have left the others inside a collective: they end with it
        if outcomes[name] != "passed":
            os._exit(1)


def tensor(data, dtype="float32"):
    from polyreme.eager.tensor import to_tensor  # noqa: PLC0415

    return to_tensor(np.asarray(data, dtype))


def check_who_is_there(rank):
    from polyreme import distributed as dist  # noqa: PLC0415

    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, SIZE, "GLOO")
    env = dist.ParallelEnv()
    assert (env.rank, env.world_size, len(env.trainer_endpoints)) == (rank, SIZE, SIZE)
    assert env.current_endpoint == env.trainer_endpoints[rank]
    assert dist.init_parallel_env() is dist.get_group(0)


def check_all_reduce_with_every_op_and_dtype(rank):
    from polyreme import distributed as dist  # noqa: PLC0415

    rows = values(1, SIZE, 2, 3)
    for name, join in OPS.items():
        x = tensor(rows[rank])
        task = dist.all_reduce(x, getattr(dist.ReduceOp, name), sync_op=name == "SUM")
        assert task.wait()
        np.testing.assert_allclose(x.numpy(), join(rows, axis=0), rtol=SIZE * 2.0**-23)
    for dtype in ("float64", "int8", "int64", "bfloat16", "complex64"):
        x = tensor([1, 2], dtype)
        dist.all_reduce(x)
        assert (x.numpy() == np.array([3, 6], x.dtype)).all()
        assert x.numpy().dtype == tensor([1], dtype).dtype
    flag, scalar, empty = tensor(rank == 1, "bool"), tensor(rank), tensor(np.zeros((0, 2)))
    for x in (flag, scalar, empty):
        dist.all_reduce(x)
    assert (flag.item(), scalar.item(), scalar.shape, empty.shape) == (True, 3.0, [], [0, 2])


def check_reduce_and_broadcast_follow_one_rank(rank):
    from polyreme import distributed as dist  # noqa: PLC0415

    x = tensor([rank, 1.0])
    dist.reduce(x, 1)
    assert x.tolist() == ([3.0, 3.0] if rank == 1 else [rank, 1.0])
    y = tensor([[np.nan, -0.0, rank]])
    dist.broadcast(y, 2)
    np.testing.assert_array_equal(y.numpy(), [[np.nan, -0.0, 2.0]])
    assert np.signbit(y.numpy()[0, 1])


def check_all_gather_and_gather(rank):
    from polyreme import distributed as dist  # noqa: PLC0415
    from polyreme.distributed.communication import stream  # noqa: PLC0415

    empty, gathered = [], [tensor([0.0, 0.0]) for _ in range(SIZE)]
    first = gathered[0]
    dist.all_gather(empty, tensor([rank, -rank]))
    dist.all_gather(gathered, tensor([rank, -rank]))
    assert gathered[0] is first
    for out in (empty, gathered):
        assert [t.tolist() for t in out] == [[r, -r] for r in range(SIZE)]
    whole = tensor(np.zeros(2 * SIZE))
    stream.all_gather(whole, tensor([rank, -rank]))
    assert whole.tolist() == [0, 0, 1, -1, 2, -2]
    scalars, kept = [], []
    dist.all_gather(scalars, tensor(rank))
    assert [(t.item(), t.shape) for t in scalars] == [(r, []) for r in range(SIZE)]
    dist.gather(tensor([rank]), kept, dst=1)
    assert [t.tolist() for t in kept] == ([[0], [1], [2]] if rank == 1 else [])


def check_scatter_and_reduce_scatter(rank):
    from polyreme import distributed as dist  # noqa: PLC0415

    rows = values(2, SIZE, SIZE, 2)
    x = tensor(np.zeros(2))
    dist.scatter(x, [tensor(r) for r in rows[1]] if rank == 1 else None, src=1)
    np.testing.assert_array_equal(x.numpy(), rows[1, rank])
    for name, join in OPS.items():
        dist.reduce_scatter(x, [tensor(r) for r in rows[rank]], getattr(dist.ReduceOp, name))
        np.testing.assert_allclose(x.numpy(), join(rows[:, rank], axis=0), rtol=SIZE * 2.0**-23)
    dist.reduce_scatter(x, tensor(rows[rank].reshape(2 * SIZE)))
    np.testing.assert_allclose(x.numpy(), rows[:, rank].sum(0), rtol=SIZE * 2.0**-23)


def check_alltoall_even_and_uneven(rank):
    from polyreme import distributed as dist  # noqa: PLC0415

    rows = values(3, SIZE, SIZE, 2)
    out = []
    dist.alltoall(out, [tensor(r) for r in rows[rank]])
    np.testing.assert_array_equal(np.stack([t.numpy() for t in out]), rows[:, rank])
    single = tensor(np.zeros((SIZE, 2)))
    dist.alltoall_single(single, tensor(rows[rank]))
    np.testing.assert_array_equal(single.numpy(), rows[:, rank])
    # rank r sends (r + j) % 3 rows to rank j
    counts = np.add.outer(np.arange(SIZE), np.arange(SIZE)) % 3
    sent = np.full((3, 2), rank * 10) + np.arange(3)[:, None]
    starts = np.concatenate([np.zeros((SIZE, 1), int), counts.cumsum(1)], 1)
    want = [
        (np.full((3, 2), r * 10) + np.arange(3)[:, None])[starts[r, rank] : starts[r, rank + 1]] for r in range(SIZE)
    ]
    uneven = tensor(np.zeros((counts[:, rank].sum(), 2)))
    dist.alltoall_single(uneven, tensor(sent), counts[rank].tolist(), counts[:, rank].tolist())
    np.testing.assert_array_equal(uneven.numpy(), np.concatenate(want))
    wrong = counts[:, rank].tolist()
    wrong = [wrong[0] + 1, wrong[1] - 1, wrong[2]] if wrong[1] else [wrong[0] - 1, wrong[1] + 1, wrong[2]]
    with pytest.raises(
        RuntimeError, match=rf"rank 0 sends {counts[0, rank]} rows to rank {rank}, whose out_split_sizes"
    ):
        dist.alltoall_single(uneven, tensor(sent), counts[rank].tolist(), wrong)


def check_rows_go_to_experts_of_other_processes_and_back(rank):
    from polyreme import distributed as dist  # noqa: PLC0415

    pair = dist.new_group([0, 1])
    if rank > 1:
        return
    x = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    counts = tensor([[2, 1, 1, 1], [1, 1, 2, 1]][rank], "int64")
    # PaddlePaddle's examples of two processes with two experts each
    there = [[[1, 2], [3, 4], [1, 2], [5, 6], [3, 4]], [[7, 8], [5, 6], [7, 8], [9, 10], [9, 10]]]
    back = [[[1, 2], [3, 4], [7, 8], [1, 2], [7, 8]], [[5, 6], [9, 10], [3, 4], [5, 6], [9, 10]]]
    for move, want in ((dist.utils.global_scatter, there), (dist.utils.moe_utils.global_gather, back)):
        rows = tensor(x)
        rows.stop_gradient = False
        out = move(rows, counts, counts, group=pair)
        assert out.tolist() == want[rank]
        (out * out).sum().backward()
        assert rows.grad.tolist() == (2 * np.array(x)).tolist()
    # the second process has no row, and nothing is for its experts
    mine = tensor([[3, 0, 0, 0], [0, 0, 0, 0]][rank], "int64")
    rows = tensor(x[:3] if rank == 0 else np.zeros((0, 2)))
    out = dist.utils.global_scatter(rows, mine, mine, group=pair)
    assert out.tolist() == rows.tolist()


def check_messages_in_any_order(rank):
    from polyreme import distributed as dist  # noqa: PLC0415

    after, before = (rank + 1) % SIZE, (rank - 1) % SIZE
    x, got = tensor([rank, 7.0]), tensor([0.0, 0.0])
    # all send first: a sender does not wait for its receiver
    sent, coming = dist.isend(x, after), dist.irecv(got, before)
    assert coming.wait()
    assert sent.wait()
    assert got.tolist() == [before, 7.0]
    ops = [dist.P2POp(dist.irecv, got, after), dist.P2POp(dist.isend, x * 2, before)]
    for task in dist.batch_isend_irecv(ops):
        task.wait()
    assert got.tolist() == [2.0 * after, 14.0]
    if rank == 0:
        for step in range(3):
            dist.send(tensor([step]), 1)
        dist.send(tensor(np.zeros((0, 4))), 1)
    if rank == 1:
        one, none = tensor([0.0]), tensor(np.zeros((0, 4)))
        seen = [dist.recv(one, 0) and one.item() for _ in range(3)]
        dist.recv(none, 0)
        assert seen == [0.0, 1.0, 2.0]


def check_a_receiver_is_told_what_came_instead(rank):
    from polyreme import distributed as dist  # noqa: PLC0415
    from polyreme.errors import DTypeError, ShapeError  # noqa: PLC0415

    if rank == 0:
        for _ in range(2):
            dist.send(tensor(np.ones((2, 3))), 1)
        dist.send(tensor([5.0]), 1)
    if rank == 1:
        with pytest.raises(
            ShapeError, match=r"rank 0 sent float32\[2, 3\], the Tensor to receive into is float32\[3, 2\]"
        ):
            dist.recv(tensor(np.zeros((3, 2))), 0)
        with pytest.raises(
            DTypeError, match=r"rank 0 sent float32\[2, 3\], the Tensor to receive into is int64\[2, 3\]"
        ):
            dist.recv(tensor(np.zeros((2, 3)), "int64"), 0)
        x = tensor([0.0])
        dist.recv(x, 0)
        assert x.tolist() == [5.0]


def check_objects(rank):
    from polyreme import distributed as dist  # noqa: PLC0415

    every = []
    dist.all_gather_object(every, {"rank": rank, "shape": (rank, None), "rows": np.arange(rank), "t": tensor([rank])})
    assert [o["rank"] for o in every] == [0, 1, 2]
    assert [len(o["rows"]) for o in every] == [0, 1, 2]
    assert [o["t"].tolist() for o in every] == [[0.0], [1.0], [2.0]]
    pair = [rank, "x" * (rank * 100)]
    dist.broadcast_object_list(pair, 2)
    assert pair == [2, "x" * 200]
    mine = ["old"]
    dist.scatter_object_list(mine, [10, 11, 12] if rank == 1 else None, 1)
    assert mine == [10 + rank]
    if rank == 0:
        dist.send_object_list([1, {"a": [2.5]}], dst=2)
    if rank == 2:
        got = [None, None]
        dist.recv_object_list(got, src_in_group=0)
        assert got == [1, {"a": [2.5]}]


def check_an_object_of_another_class_stops_every_rank(rank):
    from polyreme import distributed as dist  # noqa: PLC0415
    from polyreme.errors import DTypeError, RankError  # noqa: PLC0415

    kind, text = (DTypeError, "the object is a object") if rank == 1 else (RankError, "rank 1 has an object of a class")
    with pytest.raises(kind, match=text):
        dist.all_gather_object([], object() if rank == 1 else 1)
    if rank:
        with pytest.raises(RankError, match="rank 0 has 2 objects, this list is 1 long"):
            dist.broadcast_object_list([0], 0)
    else:
        dist.broadcast_object_list([1, 2], 0)
    if rank == 1:
        with pytest.raises(ValueError, match=r"src=1 needs in_object_list with 3 objects, .*; got 2"):
            dist.scatter_object_list([], [1, 2], 1)
        dist.send_object_list([1, 2, 3], 0)
    if rank == 0:
        with pytest.raises(RankError, match="recv_object_list: 3 objects came, this list is 1 long"):
            dist.recv_object_list([None], 1)


def check_subgroups(rank):
    from polyreme import distributed as dist  # noqa: PLC0415

    group = dist.new_group([2, 0])
    assert (group.ranks, group.rank, group.nranks) == ([0, 2], {0: 0, 1: -1, 2: 1}[rank], 2)
    x = tensor([rank + 1.0])
    if rank == 1:
        assert (dist.get_rank(group), dist.get_world_size(group)) == (-1, -1)
        with pytest.warns(UserWarning, match=r"rank 1 is not in group .* \[0, 2\]"):
            assert dist.all_reduce(x, group=group) is None
        assert x.tolist() == [2.0]
    else:
        dist.all_reduce(x, group=group)
        assert x.tolist() == [4.0]
        dist.broadcast(x, 2, group)
        with pytest.raises(ValueError, match=r"src=1 is not in group .* whose ranks are \[0, 2\]"):
            dist.broadcast(x, 1, group)
        dist.barrier(group)
    dist.barrier()


def check_ranks_that_disagree_are_named(rank):
    from polyreme import distributed as dist  # noqa: PLC0415
    from polyreme.errors import RankError  # noqa: PLC0415

    x = tensor(np.ones(2 + (rank == 1)))
    with pytest.raises(RankError, match=r"rank 0 calls all_reduce of float32\[2\], op SUM; rank 1 calls .*\[3\]"):
        dist.all_reduce(x)
    with pytest.raises(
        RankError, match=r"rank 1 calls broadcast of float32\[3\], root position 0; rank 2 calls all_reduce"
    ):
        dist.broadcast(x, 0) if rank == 1 else dist.all_reduce(x)


def check_programs_reach_no_other_process(rank):
    from polyreme import distributed as dist  # noqa: PLC0415
    from polyreme.errors import CaptureError  # noqa: PLC0415
    from polyreme.jit import to_static  # noqa: PLC0415

    def total(x):
        dist.all_reduce(x)
        return x

    with pytest.raises(CaptureError, match="all_reduce among processes inside a captured function"):
        to_static(total)(tensor([1.0]))


def network(seed):
    from polyreme import nn  # noqa: PLC0415
    from polyreme.core import rng  # noqa: PLC0415

    rng.seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def of_rank_0(rank, compute):
    """What compute() gives on rank 0, everywhere: what one process does needs to be compiled by one alone."""
    from polyreme import distributed as dist  # noqa: PLC0415

    result = [compute() if rank == 0 else None]
    dist.broadcast_object_list(result, 0)
    return result[0]


def train(model, inputs, labels, steps=2, inner=None):
    from polyreme import nn  # noqa: PLC0415
    from polyreme.optimizer import AdamW  # noqa: PLC0415

    optimizer = AdamW(0.1, parameters=model.parameters())
    losses = []
    for step in range(steps):
        loss = nn.functional.mse_loss(model(tensor(inputs[step])), tensor(labels[step]))
        loss.backward()
        losses.append(loss.item())
        if inner is not None and step == 0:
            inner.append({name: p.grad.numpy() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.clear_grad()
    return losses, {name: p.numpy() for name, p in model.state_dict().items()}


def check_data_parallel_trains_as_one_process_with_the_whole_batch(rank):
    from polyreme import distributed as dist  # noqa: PLC0415

    inputs, labels = values(4, 2, 2 * SIZE, 4), values(5, 2, 2 * SIZE, 2)
    share = slice(2 * rank, 2 * rank + 2)
    # different weights at first: the first rank's are taken
    model = dist.DataParallel(network(rank), comm_buffer_size=1e-4, last_comm_buffer_size=1e-5)
    mine = []
    losses, state = train(model, inputs[:, share], labels[:, share], inner=mine)

    def train_alone():
        gradients = []
        return *train(network(0), inputs, labels, inner=gradients), gradients

    want_losses, want, alone = of_rank_0(rank, train_alone)
    # means of at most 6 x 5 terms in another order
    tolerance = 30 * 2.0**-23
    for name, gradient in alone[0].items():
        np.testing.assert_allclose(mine[0][f"_layers.{name}"], gradient, rtol=tolerance, atol=tolerance)
    every = []
    dist.all_gather_object(every, losses)
    np.testing.assert_allclose(np.mean(every, axis=0)[0], want_losses[0], rtol=tolerance)
    assert set(state) == set(want)
    for name, value in want.items():
        # Adam's first steps are of size 0.1 whatever the gradient's rounding, unless it is about zero
        np.testing.assert_allclose(state[name], value, atol=1e-4, err_msg=name)


def check_no_sync_adds_up_and_the_next_backward_averages(rank):
    from polyreme import distributed as dist  # noqa: PLC0415

    def gradients(model):
        return [p.grad.numpy() for p in model.parameters()]

    model = dist.DataParallel(network(0))
    rows = values(6, SIZE, 2, 4)
    with model.no_sync():
        model(tensor(rows[rank, :1])).sum().backward()
        alone = gradients(model)
    model(tensor(rows[rank, 1:])).sum().backward()
    whole, mine = network(0), network(0)
    whole(tensor(rows.reshape(2 * SIZE, 4))).sum().backward()
    mine(tensor(rows[rank, :1])).sum().backward()
    for got, want, other in zip(gradients(model), gradients(whole), gradients(mine), strict=True):
        # sums of 6 terms of size at most 2 x 5 weights
        np.testing.assert_allclose(got, want / SIZE, rtol=60 * 2.0**-23, atol=1e-6)
        assert np.abs(want / SIZE - other).max() > 0.01
    # one row on its own device, in either
    for got, want in zip(alone, gradients(mine), strict=True):
        np.testing.assert_allclose(got, want, rtol=10 * 2.0**-23)


def check_parameters_that_some_rank_does_not_use(rank):
    from polyreme import distributed as dist  # noqa: PLC0415
    from polyreme import nn  # noqa: PLC0415
    from polyreme.errors import GradError  # noqa: PLC0415

    class Branching(nn.Layer):
        def __init__(self, uses_b):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(2, 1, bias_attr=False) for _ in range(3))
            self.uses_b = uses_b

        def forward(self, x):
            return self.a(x) + self.b(x) if self.uses_b else self.a(x)

    strict = dist.DataParallel(Branching(False))
    with pytest.raises(GradError, match=r"did not reach 2 of 3 parameters \(b.weight, c.weight\); pass find_unused"):
        strict(tensor([[1.0, 2.0]])).sum().backward()
    model = dist.DataParallel(Branching(rank > 0), find_unused_parameters=True)
    model(tensor([[1.0, 2.0]])).sum().backward()
    a, b, c = (p.grad for p in model.parameters())
    np.testing.assert_allclose(a.numpy().ravel(), [1.0, 2.0], rtol=2.0**-22)
    np.testing.assert_allclose(b.numpy().ravel(), [2 / 3, 4 / 3], rtol=2.0**-22)
    assert c is None


def check_a_captured_step_is_refused_and_a_captured_forward_trains(rank):
    from polyreme import distributed as dist  # noqa: PLC0415
    from polyreme.errors import CaptureError  # noqa: PLC0415
    from polyreme.jit import to_static  # noqa: PLC0415

    model = dist.DataParallel(network(0))

    def step(x):
        loss = model(x).sum()
        loss.backward()
        return loss

    with pytest.raises(CaptureError, match="capture the model's forward only"):
        to_static(step)(tensor(values(7, 2, 4)))
    model.clear_gradients(set_to_zero=False)
    to_static(model)(tensor(values(rank, 2, 4))).sum().backward()
    every = []
    dist.all_gather_object(every, model.parameters()[0].grad.numpy())
    for gradient in every:
        np.testing.assert_array_equal(gradient, every[0])


def check_a_plan_over_all_processes_makes_one_global_batch(rank):
    import jax  # noqa: PLC0415

    from polyreme import distributed as dist  # noqa: PLC0415
    from polyreme.distributed.placement import apply_plan, clear_plan  # noqa: PLC0415
    from polyreme.errors import PlacementError  # noqa: PLC0415
    from polyreme.mesh import Plan  # noqa: PLC0415

    model, rows = network(rank), values(8, 2 * SIZE, 4)
    layout = apply_plan(Plan.from_degrees(dp=DEVICES, sharding=SIZE, sharding_stage=2), model)
    parallel = dist.DataParallel(model)
    out = parallel(tensor(rows[2 * rank : 2 * rank + 2]))
    assert out.shape == [2 * SIZE, 2]
    assert "shape=[6, 2], dtype=float32, place=Place(cpu)" in repr(out)
    assert "in pieces over several processes" in repr(out)
    assert str(parallel.parameters()[0].place) == "Place(cpu)"
    loss = (out * out).mean()
    loss.backward()
    clear_plan()
    whole = network(0)
    want = whole(tensor(rows))
    want_loss = (want * want).mean()
    # sums of at most 6 x 5 terms in another order
    tolerance = 30 * 2.0**-23
    np.testing.assert_allclose(out.numpy(), want.numpy(), rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(dist.unshard_dtensor(out).numpy(), out.numpy())
    np.testing.assert_allclose(loss.item(), want_loss.item(), rtol=tolerance)
    group = dist.axis_group(layout.mesh, ("dp", "sharding"))
    assert (group.ranks, group.rank) == (list(range(SIZE * DEVICES)), DEVICES * rank)
    total = tensor([1.0])
    dist.all_reduce(total, group=group)
    assert total.tolist() == [6.0]
    every = []
    dist.all_gather_object(every, rank, group)
    assert every == [0, 0, 1, 1, 2, 2]
    with pytest.raises(PlacementError, match="is spread over several processes already"):
        dist.all_reduce(out)
    assert len(jax.devices()) == SIZE * DEVICES


def check_a_captured_step_trains_under_a_plan_over_all_processes(rank):
    from polyreme import nn  # noqa: PLC0415
    from polyreme.core import rng  # noqa: PLC0415
    from polyreme.distributed.placement import apply_plan, clear_plan, shard_batch  # noqa: PLC0415
    from polyreme.jit import to_static  # noqa: PLC0415
    from polyreme.mesh import Plan  # noqa: PLC0415
    from polyreme.optimizer import AdamW  # noqa: PLC0415

    def run(plan, seed):
        rng.seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 2))
        optimizer = AdamW(0.01, parameters=model.parameters())
        place = tensor
        if plan is not None:
            layout = apply_plan(plan, model)
            place = lambda batch: shard_batch(layout, batch, "batch", None)

        @to_static
        def step(x, y):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            return loss

        data = values(9, 3, 4 * SIZE, 6)
        losses = [step(place(rows[:, :4]), place(rows[:, 4:])).item() for rows in data]
        assert step.retraces == ["first call"]
        clear_plan()
        return losses, {name: p.numpy() for name, p in model.state_dict().items()}

    # seeds differ: parameters and the random key are rank 0's
    losses, state = run(Plan.from_degrees(dp=DEVICES, sharding=SIZE, sharding_stage=1), rank)
    want_losses, want = of_rank_0(rank, lambda: run(None, 0))
    # sums of at most 12 x 6 terms in another order, amplified by Adam's division by a root
    np.testing.assert_allclose(losses, want_losses, rtol=72 * 64 * 2.0**-23)
    for name, value in want.items():
        np.testing.assert_allclose(state[name], value, atol=3 * 0.01 * 0.05, err_msg=name)


def check_state_dicts_are_saved_together_and_each_reads_its_part(rank):
    from polyreme import distributed as dist  # noqa: PLC0415

    folder = Path(os.environ["PADDLE_LOG_DIR"], "state")
    mesh = dist.ProcessMesh(np.arange(SIZE * DEVICES).reshape(SIZE, DEVICES), ["dp", "mp"])
    whole = values(0, 6, 8)
    split = dist.shard_tensor(whole, mesh, [dist.Shard(0), dist.Shard(1)])
    own = dist.shard_weight("own", tensor(np.full((2, 3), rank)), 0, dist.get_group(0))
    for step in (3, 4):
        dist.save_state_dict({"a": {"split": split, "own": own}, "step": step}, folder, async_save=step == 4)
    other = dist.shard_tensor(whole * 0, mesh, [dist.Replicate(), dist.Shard(0)])
    part = dist.shard_weight("own", tensor(np.full((2, 3), -1)), 0, dist.get_group(0))
    state = {"a": {"split": other, "own": part}, "step": 0}
    dist.load_state_dict(state, folder)
    assert state["step"] == 4
    for shard in other._array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])
    np.testing.assert_array_equal(part.local_tensor.numpy(), np.full((2, 3), rank))
    np.testing.assert_array_equal(
        dist.load_merged_state_dict(folder)["a.own"].numpy(), np.repeat(np.arange(SIZE), 2)[:, None] * np.ones(3)
    )


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    from polyreme.distributed.spawning import spawn  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("processes")
    env = {"PADDLE_LOG_DIR": folder, "POLYREME_INIT_TIMEOUT": 60, "POLYREME_WATCHDOG_TIMEOUT": 30}
    running = spawn(job, (str(folder),), nprocs=SIZE, join=False, cpu_num=DEVICES, env=env)
    try:
        running.join(LIMIT)
    except RuntimeError as error:
        trouble = str(error)
    else:
        trouble = f"nothing within {LIMIT} s"
    finally:
        running.end()
    found = [folder / f"{rank}.json" for rank in range(SIZE)]
    return trouble, [json.loads(f.read_text()) if f.exists() else {} for f in found]


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(outcomes, name):
    trouble, ranks = outcomes
    for rank, outcome in enumerate(ranks):
        said = outcome.get(name, f"did not come so far: {trouble}")
        assert said == "passed", f"rank {rank}: {said}"
