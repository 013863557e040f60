"""predict: seconds of a step, MFU and memory of any (model, plan, cluster, batch), from first principles.

Formulas and sources: docs/planner.md. Blocks of a kind cost the same, so nothing here takes longer for a deeper model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from polyreme.errors import ConfigError
from polyreme.mesh import Durations, Plan
from polyreme.mesh.schedules import whole_seconds
from polyreme.planner.block_time import BlockTime, Setting, added, block_time
from polyreme.planner.cluster import Cluster, slowness
from polyreme.planner.communication import group
from polyreme.planner.compute import ITEMSIZE, Arithmetic
from polyreme.planner.graph import BlockCost, ModelGraph
from polyreme.planner.interval import spread
from polyreme.planner.memory import memory
from polyreme.planner.model_shape import ModelShape
from polyreme.planner.pipeline import pipeline_seconds
from polyreme.planner.prediction import Prediction, Times, Training
from polyreme.planner.sharding import Piece, cuts_of, pieces, variants


def predict(
    model: ModelShape | ModelGraph,
    plan: Plan,
    cluster: Cluster,
    batch: int,
    training: Training = Training(),  # noqa: B008
) -> Prediction:
    """What one training step of `batch` samples will cost.

    Raises PlacementError for a mesh that does not fit the cluster or a batch that does not divide, and ConfigError for
    a dtype that the device kind has no figure for.

    >>> from polyreme.planner import ModelShape, cluster_of_kind
    >>> gpt = ModelShape(hidden=2048, layers=24, heads=16, seq=1024, vocab=50304, ffn=8192)
    >>> got = predict(gpt, Plan.from_degrees(dp=8, recompute="full"), cluster_of_kind("a100-40g", 8), batch=64)
    >>> got.fits, 0.3 < got.mfu < 0.6
    (True, True)
    """
    setting = _setting(model, plan, cluster, batch, training)
    graph = setting.graph
    blocks = {block.name: block_time(block, setting) for block in variants(graph, plan)}
    times = _times(setting, blocks)
    stages = memory(graph, plan, batch, training, "cpu" if cluster.shared > 1 else "accelerator")
    fullest = max(stages, key=lambda each: each.total)
    step = times.total
    peak = cluster.device.flops[training.dtype] * (cluster.num_devices if cluster.shared == 1 else 1)
    passes = 2 if training.trains == "adapters" else 3  # frozen weights have no gradients
    return Prediction(
        step_seconds=step,
        mfu=passes * graph.flops_per_sample * batch / (step * peak),
        tokens_per_second=batch * graph.tokens / step,
        memory=fullest,
        stages=stages,
        times=times,
        capacity=cluster.device.memory * cluster.device.usable,
        binds=_binds(times, _products(setting, blocks)),
        spread=spread(graph, plan, cluster, training),
    )


def times_of(
    model: ModelShape | ModelGraph,
    plan: Plan,
    cluster: Cluster,
    batch: int,
    training: Training = Training(),  # noqa: B008
) -> Times:
    """The seconds alone, for a search that looks at the memory of the fastest plans only; raises as predict."""
    setting = _setting(model, plan, cluster, batch, training)
    return _times(setting, {block.name: block_time(block, setting) for block in variants(setting.graph, plan)})


def least_seconds(
    model: ModelShape | ModelGraph,
    plan: Plan,
    cluster: Cluster,
    batch: int,
    training: Training = Training(),  # noqa: B008
) -> float:
    """Seconds below which no plan with this one's mesh, strategy, expert dispatch and number of microbatches comes: its
    arithmetic and what its layers exchange, shared evenly by the stages. Schedule, sums over replicas, update,
    recompute and offload, which only add to that, are left out; raises as predict."""
    setting = _setting(model, plan, cluster, batch, training)
    least = replace(setting, plan=replace(plan, recompute="none", recompute_share=1.0))
    whole = _chunk(
        [(block, block.repeats) for block in setting.graph.blocks],
        {block.name: block_time(block, least) for block in setting.graph.blocks},
    )
    stages = 1 if cluster.shared > 1 else plan.mesh.pp  # devices that share their units run one stage at a time
    return plan.num_microbatches * whole_seconds(whole.durations(0.0)) / stages


def chunk_durations(
    model: ModelShape | ModelGraph, plan: Plan, cluster: Cluster, batch: int, training: Training
) -> tuple[Durations, ...]:
    """Seconds that each chunk of the model takes on one microbatch, in the order that data flows; raises as predict."""
    setting = _setting(model, plan, cluster, batch, training)
    blocks = {block.name: block_time(block, setting) for block in variants(setting.graph, plan)}
    send = _send(setting)
    return tuple(_chunk(piece, blocks).durations(send) for piece in pieces(setting.graph, plan, training.cut))


def stage_tails(
    model: ModelShape | ModelGraph, plan: Plan, cluster: Cluster, batch: int, training: Training
) -> tuple[float, ...]:
    """Seconds of each stage behind its last backward: sums over replicas that nothing hides, the update, and what is
    moved to and from the host; raises as predict."""
    setting = _setting(model, plan, cluster, batch, training)
    blocks = {block.name: block_time(block, setting) for block in variants(setting.graph, plan)}
    cut = pieces(setting.graph, plan, training.cut)
    owners = plan.stage_of_chunk if plan.schedule else (0,)
    stages = [[chunk for chunk, owner in enumerate(owners) if owner == stage] for stage in range(plan.mesh.pp)]
    summed = _summing(setting, cut, [_chunk(piece, blocks) for piece in cut], stages)
    room = 0.0 if cluster.shared > 1 else math.inf  # activations move while other work goes on
    return tuple(
        sum(summing.values()) + _update(setting, cut, [stage]) + _offload(setting, cut, [stage], room)
        for stage, summing in zip(stages, summed, strict=True)
    )


def _setting(model: ModelShape | ModelGraph, plan: Plan, cluster: Cluster, batch: int, training: Training) -> Setting:
    """What blocks are priced under, checked."""
    graph = model.graph(training.attention) if isinstance(model, ModelShape) else model
    plan.mesh.check_devices(cluster.num_devices)
    plan.rows_per_device(batch)
    _check_dtype(training, cluster)
    crowd = cluster.num_devices // plan.mesh.pp if cluster.shared > 1 else 1
    on = Arithmetic(cluster.device, training, crowd, cluster.shared > 1)
    return Setting(graph, plan, cluster, training, batch / plan.num_microbatches, on)


def _check_dtype(training: Training, cluster: Cluster) -> None:
    known = [dtype for dtype in cluster.device.flops if dtype in ITEMSIZE]
    for dtype in (training.dtype, training.products or training.dtype):
        if dtype not in known:
            raise ConfigError(
                f"device kind {cluster.device.name!r} has no FLOP/s of dtype {dtype!r}; it multiplies "
                f"{' and '.join(known)}: choose by train.amp_dtype and train.amp_level"
            )


class _Chunk(NamedTuple):
    """Seconds of one chunk on one microbatch, as BlockTime."""

    forward: float
    inputs: float
    weights: float
    again: float
    exposed_forward: Mapping[str, float]
    exposed_backward: Mapping[str, float]

    def durations(self, send: float) -> Durations:
        """As the schedule takes them."""
        return Durations(
            self.forward + sum(self.exposed_forward.values()),
            self.inputs + self.again + sum(self.exposed_backward.values()),
            self.weights,
            send,
        )


def _chunk(piece: Iterable[tuple[BlockCost, int]], times: Mapping[str, BlockTime]) -> _Chunk:
    counted = [(times[block.name], count) for block, count in piece]

    def scaled(name: str) -> dict[str, float]:
        return added(*({axis: s * count for axis, s in getattr(time, name).items()} for time, count in counted))

    return _Chunk(
        forward=sum(time.forward * count for time, count in counted),
        inputs=sum(time.inputs * count for time, count in counted),
        weights=sum(time.weights * count for time, count in counted),
        again=sum(time.again * count for time, count in counted),
        exposed_forward=scaled("exposed_forward"),
        exposed_backward=scaled("exposed_backward"),
    )


def _times(setting: Setting, blocks: Mapping[str, BlockTime]) -> Times:
    plan, m = setting.plan, setting.plan.num_microbatches
    cut = pieces(setting.graph, plan, setting.training.cut)
    alike = {tuple((block.name, count) for block, count in piece): piece for piece in cut}
    made = {key: _chunk(piece, blocks) for key, piece in alike.items()}
    chunks = [made[tuple((block.name, count) for block, count in piece)] for piece in cut]
    stages: list[list[int]] = [[] for _ in range(plan.mesh.pp)]
    for chunk_index, owner in enumerate(plan.stage_of_chunk if plan.schedule else (0,)):
        stages[owner].append(chunk_index)
    send = _send(setting)
    durations = [chunk.durations(send) for chunk in chunks]
    works = [sum(sum(durations[chunk_index][:3]) for chunk_index in stage) for stage in stages]
    is_serial = setting.cluster.shared > 1
    summed = _summing(setting, cut, chunks, [range(len(chunks))] if is_serial else stages)
    # a stage of little work may be the last one all the same, by the gradients that it sums
    ends = [m * work + sum(summing.values()) for work, summing in zip(works, summed, strict=not is_serial)]
    last = max(range(len(ends)), key=ends.__getitem__)
    slowest = stages[last]
    counted = [chunks[chunk_index] for chunk_index in (range(len(chunks)) if is_serial else slowest)]
    exposed = {
        axis: m * seconds
        for axis, seconds in added(
            *(c.exposed_forward for c in counted), *(c.exposed_backward for c in counted)
        ).items()
    }
    if is_serial:
        waiting = _serial_tasks(setting, len(chunks))
    else:
        waiting = max(0.0, pipeline_seconds(plan, durations) - m * max(works))
    for axis, seconds in summed[last].items():
        exposed[axis] = exposed.get(axis, 0.0) + seconds
    compute, recompute = m * sum(c.forward + c.inputs + c.weights for c in counted), m * sum(c.again for c in counted)
    return Times(
        compute=compute,
        recompute=recompute,
        exposed={axis: seconds for axis, seconds in exposed.items() if seconds > 0},
        bubble=waiting,
        optimizer=_update(setting, cut, stages) + setting.training.overhead,
        offload=_offload(setting, cut, stages, 0.0 if is_serial else compute + recompute),
        slowest=(slowness(setting.cluster) - 1) * (compute + recompute),
    )


def _serial_tasks(setting: Setting, num_chunks: int) -> float:
    """Where programs run one at a time nobody waits for another stage, but every task is dispatched and sent on."""
    if num_chunks == 1:
        return 0.0
    sends = 2 * (num_chunks - 1) * _send(setting)
    return setting.plan.num_microbatches * (2 * num_chunks * setting.cluster.task + sends)


def _send(setting: Setting) -> float:
    """Seconds to give a microbatch of the residual stream to the next stage: each device sends what it holds."""
    block = next((b for b in setting.graph.blocks if b.part == "layer"), setting.graph.blocks[-1])
    value = block.operations[-1].output
    nbytes = cuts_of(setting.plan).local(value, setting.samples) * (value.itemsize or setting.arithmetic.itemsize)
    return group(setting.cluster, setting.plan.mesh, ("pp",)).send(nbytes)


def _summing(
    setting: Setting, cut: Sequence[Piece], chunks: Sequence[_Chunk], stages: Sequence[Sequence[int]]
) -> list[dict[str, float]]:
    """Of each stage what _reduction says; once of stages that have such chunks."""
    cached: dict[object, dict[str, float]] = {}
    result = []
    for stage in stages:
        key = tuple(tuple((block.name, count) for block, count in cut[at]) for at in stage)
        if key not in cached:
            cached[key] = _reduction(setting, [cut[at] for at in stage], chunks, stage)
        result.append(cached[key])
    return result


def _reduction(
    setting: Setting, pieces: Sequence[Piece], chunks: Sequence[_Chunk], stage: Sequence[int]
) -> dict[str, float]:
    """Seconds of summing gradients over the axes that cut the data, and of gathering updated parameters, that are not
    hidden: a sum runs beside the backward of the last microbatch (of every one where each is summed, as under ZeRO
    stage 2), a gather beside the first forward; one block's part sticks out, and sums over several groups share the
    room. Source: arXiv:1910.02054, section 7."""
    plan, cluster = setting.plan, setting.cluster
    if setting.training.trains == "adapters":
        return {}
    sums, gathers, blocks = _sum(setting, pieces)
    # a chunk's sum begins when its last microbatch is done: where chunks take turns, p microbatches of the others
    # come after
    v = plan.virtual_stages
    rounds = 1 if plan.schedule_kind.is_v else min(plan.num_microbatches, (plan.mesh.pp * (v - 1) + 1) / v)
    backward = sum(sum(chunks[at].durations(0.0)[1:3]) for at in stage)
    forward = sum(chunks[at].durations(0.0)[0] for at in stage)
    # what is sent for each microbatch has no more room than that one gives
    room = {
        (is_gather, is_once): (forward if is_gather else backward) * (rounds if is_once else 1)
        for is_gather in (True, False)
        for is_once in (True, False)
    }
    result: dict[str, float] = defaultdict(float)
    for (axes, what, times), (nbytes, arrays) in (*sums.items(), *gathers.items()):
        if not axes:
            continue
        among = group(cluster, plan.mesh, axes)
        seconds = among.all_gather(nbytes, arrays) if what == "all_gather" else getattr(among, what)(nbytes)
        axis = "dp" if "dp" in axes else min(axes)
        if setting.hides(axis):
            beside = what == "all_gather", times == 1
            hidden = min(seconds - seconds / blocks, room[beside])
            room[beside] -= hidden
            seconds -= hidden
        result[axis] += times * seconds
    return result


_Sums = dict[tuple[frozenset[str], str, int], tuple[float, int]]


def _sum(setting: Setting, pieces: Sequence[Piece]) -> tuple[_Sums, _Sums, int]:
    """(bytes, arrays) by (axes, collective, times a step): of sums of gradients, of gathers of parameters; and how many
    blocks there are."""
    plan, cuts, training = setting.plan, cuts_of(setting.plan), setting.training
    sums: _Sums = {}
    gathers: _Sums = {}

    def add(found: _Sums, key: tuple[frozenset[str], str, int], nbytes: float, arrays: int) -> None:
        before, others = found.get(key, (0.0, 0))
        found[key] = before + nbytes, others + arrays

    tokens = cuts.axes("act", ("batch", "block_seq"), (1, 0))
    of_parameter = setting.arithmetic.itemsize if training.master else 4
    is_staged = training.sums == "program" and plan.schedule is not None
    is_each = training.sums == "program" and not is_staged and setting.cluster.shared > 1
    for block, count in (each for piece in pieces for each in piece):
        for value in block.parameters:
            used = cuts.axes("use", value.dims, value.shape)
            whole = count * value.size / cuts.degree(used)
            data = tokens - used
            kept = cuts.axes("param", value.dims, value.shape) - used
            state = (cuts.axes("state", value.dims, value.shape) - used) & data
            if kept:  # stage 3 has scattered them, block by block
                add(sums, (data - kept, "all_reduce", 1), whole / cuts.degree(kept) * training.gradients, count)
                continue
            split = (cuts.axes("grad", value.dims, value.shape) - used) & data
            times = plan.num_microbatches if is_each or (split and not is_staged) else 1
            if state:
                add(sums, (state, "reduce_scatter", times), whole * training.gradients, count)
                add(gathers, (state, "all_gather", 1), whole * of_parameter, count)
            reduced = whole / cuts.degree(state) * training.gradients
            add(sums, (data - state, "all_reduce", times if is_each else 1), reduced, count)
    return sums, gathers, max(1, sum(count for piece in pieces for _, count in piece))


def _on_stages(setting: Setting, cut: Sequence[Piece], stages: Sequence[Sequence[int]], kind: str) -> list[float]:
    """Elements of parameters on one device of each stage, as tensors of the kind are cut."""
    cuts = cuts_of(setting.plan)
    blocks = variants(setting.graph, setting.plan)
    of = {b.name: sum(value.size / cuts.ways(kind, value) for value in b.parameters) for b in blocks}
    return [sum(of[block.name] * count for at in stage for block, count in cut[at]) for stage in stages]


def _update(setting: Setting, cut: Sequence[Piece], stages: Sequence[Sequence[int]]) -> float:
    """Seconds of AdamW: parameter, two moments and gradient read, the first three written (and the copy in the compute
    dtype), as wide as they are kept; the gradient is read once more for its norm."""
    training = setting.training
    if training.trains == "adapters":
        return 0.0
    _, width = training.state_arrays
    has_copy = training.master and not training.narrow
    each = width * 6 + training.gradients + (setting.arithmetic.itemsize if has_copy else 0)
    states = _on_stages(setting, cut, stages, "state")
    gradients = _on_stages(setting, cut, stages, "grad")
    seconds = [
        setting.arithmetic.copy(s * each + g * training.gradients) for s, g in zip(states, gradients, strict=True)
    ]
    return sum(seconds) if setting.cluster.shared > 1 else max(seconds)


def _offload(setting: Setting, cut: Sequence[Piece], stages: Sequence[Sequence[int]], room: float) -> float:
    """Seconds of moving what is kept in host memory: moments (and master parameters) there and back once a step;
    activations beside so many seconds of arithmetic."""
    plan, host = setting.plan, setting.cluster.device.host
    total = 0.0
    if "state" in plan.offload:
        nbytes = math.prod(setting.training.state_arrays) * plan.offload_ratio
        total += 2 * max(_on_stages(setting, cut, stages, "state")) * nbytes / host
    if plan.streams:
        nbytes = max(_on_stages(setting, cut, stages, "param")) * setting.arithmetic.itemsize
        total += 2 * nbytes * plan.num_microbatches / host
        total += 2 * max(_on_stages(setting, cut, stages, "grad")) * setting.training.gradients / host
    if "act" in plan.offload or setting.training.away:
        saved = max(sum(_save(setting, block) * count for at in s for block, count in cut[at]) for s in stages)
        total += max(0.0, 2 * saved * plan.num_microbatches / host - room)
    return total


def _save(setting: Setting, block: BlockCost) -> float:
    """Bytes that one run of a layer keeps for its backward; its input alone where it is computed again."""
    if block.part != "layer":
        return 0.0
    cuts, itemsize = cuts_of(setting.plan), setting.arithmetic.itemsize
    recompute = setting.plan.recompute if block.recomputes else "none"
    values = {value.name: value for op in block.operations for value in (*op.inputs, op.output)}
    first = block.operations[0].inputs[0]
    kept = {first.name} if recompute == "full" else {name for op in block.operations for name in op.saved}
    return sum(cuts.local(values[n], setting.samples) * (values[n].itemsize or itemsize) for n in kept if n in values)


def _products(setting: Setting, blocks: Mapping[str, BlockTime]) -> float:
    """Share of the arithmetic that is matrix products and attention; the rest moves bytes."""
    found = [(blocks[block.name], block.repeats) for block in setting.graph.blocks]
    whole = sum((time.forward + time.backward + time.again) * count for time, count in found)
    return sum(time.products * count for time, count in found) / whole if whole else 1.0


def _binds(times: Times, products: float) -> str:
    """The two largest parts of the step, in words."""
    parts = {
        "matrix products": times.compute * products,
        "operations that only move bytes": times.compute * (1 - products),
        "computing again (recompute)": times.recompute,
        "waiting in the pipeline": times.bubble,
        "the optimizer's update": times.optimizer,
        "moving to and from host memory": times.offload,
        "waiting for the slowest device": times.slowest,
        **{f"communication over {axis}": seconds for axis, seconds in times.exposed.items()},
    }
    most = sorted(parts, key=parts.__getitem__, reverse=True)[:2]
    total = times.total or 1.0
    return ", then ".join(f"{name}: {parts[name] / total:.0%} of the step" for name in most if parts[name] > 0)
