"""Communication of a transformer's training step under a plan, by formula, before anything is compiled.

Symbols: b rows of a microbatch on one device, s positions on one device, h hidden size, w bytes of an activation's
element, l layers, v vocabulary, m microbatches, P_i bytes of parameter i on one device where an op reads it (split by
mp only), G_i its gradient's. act = b s h w: the residual stream on one device, of a sequence not split by mp.

    data parallel         all-reduce of G_i over dp, sharding and sep, once a step. arXiv:1910.02054, section 7.1
    ZeRO 1 and 2          reduce-scatter of G_i over sharding (then all-reduce of the piece over dp and sep), and
                          all-gather of the updated P_i. arXiv:1910.02054, section 7.2.1
    ZeRO 3                all-gather of P_i for the forward, and again for the backward of each microbatch where it
                          reads P_i (weights and gains; not biases, tables or a head whose gradient is made in the
                          forward), and reduce-scatter of G_i. arXiv:1910.02054, section 7.2.2. With
                          overlap.sharding = ring, of ZeRO 2 too, instead of that reduce-scatter of a linear map's G_i
                          collective-permutes of w / sharding for each element, sharding - 1 each microbatch, then the
                          sum of the piece over dp and sep
    tensor parallel       all-reduce of act over mp: 2 l forward, 2 l backward, 1 forward after the vocabulary-split
                          embedding, 1 backward before it as output head; of 3 b s fp32 numbers for the cross-entropy
                          (largest logit, sum of exponentials, the label's logit). arXiv:1909.08053, section 3. Of
                          latent attention, whose maps to latents no device splits, the backward sums over mp, in
                          place of its input's gradient, those of the latents of queries and of keys and values, and
                          of the keys' part that all heads share: b s w r each, r its width. arXiv:2405.04434
    sequence parallel     instead of each of those all-reduces of act, an all-gather before a block half and a
                          reduce-scatter after it, in the forward and in the backward; the gradients of parameters
                          that mp does not split are sums over mp too. arXiv:2205.05198, section 4.2. With
                          overlap.mp = ring instead of a half's all-gather and each map's reduce-scatter
                          collective-permutes of act / mp, mp - 1 each; in the backward twice as many for a half's
                          input, and as many for each map's output
    segment, Ulysses      all-to-all over sep of q, k, v and of the result, forward and backward: 2 (2 q + 2 k) l with q
                          and k the bytes of all query and all key heads on one device. arXiv:2309.14509, section 3
    segment, ring         collective-permutes of k and v, sep - 1 forward; of k and v, and of their gradients in 32
                          bits, sep - 1 each backward. arXiv:2310.01889, section 3
    segment, gather       all-gather of k and v, sep 2 k, forward and again backward, and reduce-scatter of their
                          gradients in 32 bits. arXiv:2407.21783, section 3.3.2
    segment, usp          Ulysses' all-to-alls among the neighbours that deal heads out, u of them, and the ring's
                          permutes, of the same k and v, for sep / u devices. arXiv:2405.07719
    zigzag by attention   where the model does not keep its tokens so, collective-permutes of q, k, v and the result,
                          forward and backward: (2 q + 2 k) l of which the part that changes its device is sent
    experts               of e, of which k work on a token, split over P devices; t = b s tokens of a device. The
                          gradient of an expert's weights is a sum over the other token axes. Gathered: all-gather of
                          tokens, choices and gates (P t (h w + 8 k)) and reduce-scatter of 4 P t h forward, the
                          opposite backward; sent: all-to-all of P t min(k, e / P) rows there and back, forward and
                          backward, and of e counts. Balanced: all-to-all of P (t k / P + P - 1) rows, each with the
                          4 bytes of its way, and of t k rows, there and back, and again backward; an all-gather of
                          P e counts; sums over P of the weights of a round's hot experts, and of their gradients. A
                          further round (a loop of unknown length, counted once) sums the weights in the forward, and
                          weights and gradients in the backward. With mp inside experts the gates' gradients (4 t
                          k) are summed over it. arXiv:2006.16668, section 3.3. In two levels of n nodes with g
                          devices each all-to-all is one along g and one along n, of the same payload V: V (g - 1) / g
                          within a node, and between nodes V (n - 1) / n as in one level, in n - 1 messages of a device
                          and not g (n - 1). arXiv:2203.14685
    pipeline              between stages, no collective and in no program: act to the next stage forward and back, for
                          each microbatch and each chunk that another stage follows (arXiv:2104.04473, section 2.2);
                          P_i of a parameter that another stage shares, and G_i back, once a step. A stage has the terms
                          of its own layers; the first chunk has the embedding's, the last the head's and the loss's.
    scalars               4 bytes each: the loss and the number of its tokens over the batch's axes; for the global
                          norm, one sum for each parameter whose gradient is split, over the axes that split it.

Under a pipeline each microbatch's backward is a program of its own, and so is each forward. Gradients stay unreduced
over dp, sharding and sep until the last of them, which sums them, all uses of a parameter in a chunk together, on every
backend; what is summed then are master gradients, of 32 bits whatever the parameters' dtype.
What each program does for itself is once a microbatch: the gathers of ZeRO 3 and, since there a device keeps a piece of
a gradient alone, the sum over sharding; sums over mp; the sum over dp of the position table's gradient, whose rows sep
splits. With sequence parallelism a backward gathers the
inputs of its 2 l block halves again, since the forward keeps a device's part of them only (arXiv:2205.05198, section
4.2.2); where weights get their gradients in a program of their own, it gathers what came in from behind again too.

Where the compiler does not join sums, a sum over two dims that different axes split is made in two steps, one for each
dim (the global norm's always is): the gradients of norm gains and tables are counted so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from polyreme.distributed.comm_report.collectives import wire_share
from polyreme.distributed.comm_report.workload import BlockMaps, ParameterShape, Use, Workload, block_maps
from polyreme.errors import ConfigError
from polyreme.kernels.balanced_experts import RelaySlots, expert_slots
from polyreme.kernels.zigzag import moved_share
from polyreme.mesh import MeshShape, Plan

SCALAR_BYTES = 4
_MADE_WIDE: tuple[Use, ...] = ("gain", "shift", "lookup", "head")
"""Uses whose gradients are made, and summed, in at least 32 bits, whatever the parameter's dtype."""
PHASES = ("forward", "backward")


@dataclass(frozen=True)
class Compiler:
    """Properties of a backend's XLA compiler that the formulas of collectives depend on.

    reduce_scatter: an all-reduce of which each device keeps a piece becomes a reduce-scatter (ReduceScatterCreator).
    reassociates: a sum of all-reduces becomes an all-reduce of the sum (AllReduceReassociate), so that a gradient made
    of several parts, by microbatches, by two uses of a tied table or by several maps of one input, is reduced once.
    XLA's CPU pipeline has neither pass, nor a flag to add one: there a reduce-scatter is an all-reduce, over all axes
    at once, and each part is reduced by itself. reduces_low: sums of 16-bit numbers travel in 16 bits; the CPU's
    travel in 32 (AllReducePromotion). has_ragged: there is an all-to-all of parts that differ in size.
    """

    reduce_scatter: bool = True
    reassociates: bool = True
    reduces_low: bool = True
    has_ragged: bool = False


COMPILERS = {"cpu": Compiler(False, False, False), "gpu": Compiler(), "tpu": Compiler(has_ragged=True)}
BEST = Compiler()
"""Every pass at work: the lower bound, where there is no ragged all-to-all."""


@dataclass(frozen=True)
class Term:
    """One line of the formula: `times` collectives of `payload` bytes over `axes` in a step.

    kind: as in collectives.KINDS, or "send", what goes from stage to stage, outside all programs.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    payload: float
    times: int
    phase: str
    group_size: int

    @property
    def total_wire(self) -> float:
        """Bytes one device sends in a step."""
        return self.payload * self.times * wire_share(self.kind, self.group_size)


def terms(plan: Plan, work: Workload, compiler: Compiler = BEST) -> list[Term]:
    """The step's collectives by formula, those that move nothing left out; with pp > 1 one stage's, and its sends.

    Raises ConfigError with pp > 1 for the work of a whole model: stage_workloads cuts it.

    >>> work = Workload((ParameterShape("w", ("embed", "ffn"), (8, 32)),), 8, 4, 8, 0, 8, norms=0)
    >>> [(t.name, t.kind, t.total_wire) for t in terms(Plan.from_degrees(dp=2), work) if t.payload > 8]
    [('gradients', 'all-reduce', 1024.0)]
    """
    if (plan.mesh.pp > 1) != (work.stage is not None):
        raise ConfigError(
            f"mesh {plan.mesh} and the work of stage {work.stage}: under a pipeline the formula is one stage's; cut "
            "the work with stage_workloads"
        )
    made = _Terms(plan, work, compiler)
    found = [*made.gradients(), *made.parameters(), *made.tensor(), *made.segment(), *made.experts()]
    found += [*made.pipeline(), *made.scalars()]
    return [t for t in found if t.total_wire > 0]


class _Terms:
    def __init__(self, plan: Plan, work: Workload, compiler: Compiler) -> None:
        self.plan, self.work, self.compiler = plan, work, compiler
        self.mesh: MeshShape = plan.mesh
        act = plan.strategy.rule("act")
        self.batch_axes = self._live(act.get("batch", ()))
        self.is_sequence_parallel = "mp" in act.get("seq", ()) and self.mesh.mp > 1
        self.is_tensor_parallel = self.mesh.mp > 1 and bool(act.get("heads", ()))
        self.sep = self.mesh.sep if "sep" in act.get("seq", ()) else 1
        self.token_axes = self._live((*self.batch_axes, *(("sep",) if self.sep > 1 else ())))
        self.expert_axes = self._live(act.get("expert", ()))
        rows = work.batch / (plan.num_microbatches * math.prod(self.mesh.degree(a) for a in self.batch_axes))
        self.tokens = rows * work.seq / self.sep
        self.act = self.tokens * work.hidden * work.itemsize
        self.act_summed = self.act if compiler.reduces_low else self.tokens * work.hidden * max(4, work.itemsize)
        self.microbatches = plan.num_microbatches
        # how often what one program does once is done in a step
        self.programs = 1 if work.stage is None else plan.num_microbatches
        at = 0 if work.stage is None else work.stage
        self.is_last = plan.stage_of_chunk[-1] == at

    def gradients(self) -> Iterator[Term]:
        for p in self.work.parameters:
            elements = self._bytes(p, "use") / p.itemsize
            nbytes = elements * self._sum_width(p)
            if "product" in p.uses and self.plan.sums_in_ring(p.dims, p.shape):
                yield from self._ring_sum(p, elements)
                continue
            if self.work.stage is not None:
                yield from self._staged_sum(p, elements)
                continue
            if self.compiler.reassociates:
                yield from self._best_sum(p, nbytes)
                continue
            for use in p.uses:
                for axes, share in self._sums(use):
                    yield self._term("gradients", "all-reduce", axes, nbytes * share, self.microbatches, "backward")

    def _sum_width(self, p: ParameterShape, *, is_master: bool = False) -> int:
        """Bytes of an element of a sum of a parameter's gradient. is_master: of what microbatches were added up to."""
        is_wide = is_master or not self.compiler.reduces_low or any(use in _MADE_WIDE for use in p.uses)
        return max(4, p.grad_itemsize) if is_wide else p.grad_itemsize

    def _ring_sum(self, p: ParameterShape, elements: float) -> Iterator[Term]:
        """Pieces that go round, of every microbatch; each device then has a sum over the ring of its own."""
        ways = self.mesh.sharding
        piece, times = elements / ways * self.work.itemsize, (ways - 1) * self.microbatches
        yield self._term("rings of gradients", "collective-permute", ("sharding",), piece, times, "backward")
        others = tuple(axis for axis in self.token_axes if axis != "sharding")
        is_once = self.compiler.reassociates and self.work.stage is None
        nbytes, runs = elements / ways * self._sum_width(p), 1 if is_once else self.microbatches
        yield self._term("gradients", "all-reduce", others, nbytes, runs, "backward")

    def _best_sum(self, p: ParameterShape, nbytes: float) -> Iterator[Term]:
        """One sum over all devices, of which each that keeps a piece gets only that."""
        axes = {axis for use in p.uses for found, _ in self._sums(use) for axis in found}
        if "sharding" in axes and self.compiler.reduce_scatter and self._is_split(p, "sharding", "state"):
            axes.remove("sharding")
            yield self._term("gradients", "reduce-scatter", ("sharding",), nbytes, 1, "backward")
            nbytes /= self.mesh.sharding
        yield self._term("gradients", "all-reduce", tuple(axes), nbytes, 1, "backward")

    def _staged_sum(self, p: ParameterShape, elements: float) -> Iterator[Term]:
        """The sums that every microbatch's program makes, then those of the step's last, of what all added up to."""
        nbytes, once_nbytes = elements * self._sum_width(p), elements * self._sum_width(p, is_master=True)
        sums = [found for use in p.uses for found in self._sums(use)]
        once = {axis for axes, _ in sums for axis in axes if axis in self.token_axes}
        if self._is_split(p, "sharding", "param"):
            once.discard("sharding")
            kind = "reduce-scatter" if self.compiler.reduce_scatter else "all-reduce"
            yield self._term("gradients", kind, ("sharding",), nbytes, self.microbatches, "backward")
            nbytes, once_nbytes = nbytes / self.mesh.sharding, once_nbytes / self.mesh.sharding
        if any("mp" in axes for axes, _ in sums):
            yield self._term("gradients", "all-reduce", ("mp",), nbytes, self.microbatches, "backward")
        if self.sep > 1 and p.uses == ("positions",):
            once -= set(self.batch_axes)
            batch = tuple(axis for axis in self.batch_axes if not self._is_split(p, axis, "param"))
            yield self._term("gradients", "all-reduce", batch, nbytes / self.sep, self.microbatches, "backward")
        # a tied table's lookup is in the first chunk, the head in the last: under a V one stage has both
        chunks = 2 if {"lookup", "head"} <= set(p.uses) else 1
        if "sharding" in once and self.compiler.reduce_scatter and self._is_split(p, "sharding", "state"):
            once.remove("sharding")
            yield self._term("gradients", "reduce-scatter", ("sharding",), once_nbytes, chunks, "backward")
            once_nbytes /= self.mesh.sharding
        yield self._term("gradients", "all-reduce", tuple(once), once_nbytes, chunks, "backward")

    def _sums(self, use: Use) -> list[tuple[tuple[str, ...], float]]:
        """The partitioner's sums for a gradient: the axes of each, and the share of the gradient it is of.

        A product joins batch and seq to one dim and sums over both at once; other ops sum over one dim, then the other.
        """
        if use in ("product", "bias", "head"):
            return [(self.token_axes, 1.0)]
        if use == "expert":
            return [(tuple(axis for axis in self.token_axes if axis not in self.expert_axes), 1.0)]
        along = self._live((*(("sep",) if self.sep > 1 else ()), *(("mp",) if self.is_sequence_parallel else ())))
        if use == "lookup":  # mp splits the table's rows, not the positions
            along = tuple(axis for axis in along if axis != "mp")
        # each device has the rows of its own positions
        share = 1 / math.prod(self.mesh.degree(axis) for axis in along) if use == "positions" else 1.0
        return [(self.batch_axes, share), (along, 1.0)]

    def parameters(self) -> Iterator[Term]:
        for p in self.work.parameters:
            if not self._is_split(p, "sharding", "state"):
                continue
            nbytes = self._bytes(p, "use")
            if self._is_split(p, "sharding", "param"):
                yield self._term("parameters", "all-gather", ("sharding",), nbytes, self.programs, "forward")
                if any(use in ("product", "gain") for use in p.uses):
                    again = self.microbatches
                    yield self._term("parameters again", "all-gather", ("sharding",), nbytes, again, "backward")
            elif p.is_home:
                yield self._term("updated parameters", "all-gather", ("sharding",), nbytes, 1, "update")

    def tensor(self) -> Iterator[Term]:
        if not self.is_tensor_parallel:
            return
        m, mp = self.microbatches, ("mp",)
        looks_up = any("lookup" in p.uses for p in self.work.parameters)
        scores = any("head" in p.uses for p in self.work.parameters)
        maps = block_maps(self.work.parameters)
        layers = len(maps) / 2
        if self.plan.overlap.mp == "ring":
            yield from self._rings(maps)
            maps = [replace(half, columns=0, rows=0) for half in maps if half.experts or half.latents]
            layers = len(maps) / 2
        # a map's input gets a part of its gradient from each map that reads it, a half's output a part from each map
        columns, rows = ([getattr(half, name) + half.experts for half in maps] for name in ("columns", "rows"))
        if self.compiler.reassociates:
            columns, rows = ([min(1, count) for count in counts] for counts in (columns, rows))
        halves = {"forward": sum(rows) + looks_up, "backward": sum(columns) + scores}
        width = max(4, self.work.itemsize) if not self.compiler.reduces_low else self.work.itemsize
        for latent in (latent for half in maps for latent in half.latents):
            yield self._term("gradients of latents", "all-reduce", mp, self.tokens * latent * width, m, "backward")
        for phase, count in halves.items():
            if not self.is_sequence_parallel:
                yield self._term("block halves", "all-reduce", mp, self.act_summed, count * m, phase)
                continue
            scatter = "reduce-scatter" if self.compiler.reduce_scatter else "all-reduce"
            gathered = round(2 * layers) + (scores if phase == "forward" else looks_up)
            yield self._term("into block halves", "all-gather", mp, self.act, gathered * m, phase)
            if self.work.stage is not None and phase == "backward":
                again = round(2 * layers) + (2 * self.work.put_off if layers else 0)
                yield self._term("into block halves again", "all-gather", mp, self.act, again * m, phase)
            yield self._term("out of block halves", scatter, mp, self.act_summed, count * m, phase)
        if scores:
            yield self._term("cross-entropy", "all-reduce", mp, self.tokens * 4, 3 * m, "forward")

    def _rings(self, maps: Sequence[BlockMaps]) -> Iterator[Term]:
        """Parts of a sequence that go round: for a half's maps of columns their input, and back its gradient and the
        input again; for one of rows what it sums, and back the gradient of that."""
        into, out = sum(half.columns > 0 for half in maps), sum(half.rows for half in maps)
        for name, rings in (("into", {"forward": into, "backward": 2 * into}), ("out of", dict.fromkeys(PHASES, out))):
            for phase, count in rings.items():
                times = count * (self.mesh.mp - 1) * self.microbatches
                part = self.act / self.mesh.mp
                yield self._term(f"rings {name} block halves", "collective-permute", ("mp",), part, times, phase)

    def segment(self) -> Iterator[Term]:
        if self.sep == 1:
            return
        times, axes = self.work.num_layers * self.microbatches, ("sep",)
        width = self.tokens * self.work.itemsize / (self.mesh.mp if self.is_tensor_parallel else 1)
        mp = self.mesh.mp if self.is_tensor_parallel else 1
        heads, kv_heads = self.work.heads // mp, self.work.kv_heads // mp
        query, keys = width * (self.work.query_width or self.work.hidden), width * self.work.key_width
        if self.work.kv_heads % mp:  # each query head gets a copy of its key head
            kv_heads, keys = heads, query
        # in keys' gradients others' are added up
        summed = keys * max(4, self.work.itemsize) / self.work.itemsize
        way = self.plan.segment_way(self.work.seq // self.sep, heads, kv_heads)
        if way.how in ("ulysses", "usp"):
            for phase in PHASES:
                term = self._term("attention heads", "all-to-all", axes, 2 * query + 2 * keys, times, phase)
                yield replace(term, group_size=way.inner)
        if way.how == "gather":
            for phase in PHASES:
                yield self._term("keys and values", "all-gather", axes, self.sep * 2 * keys, times, phase)
            whole = self.sep * 2 * summed
            yield self._term("gradients of keys and values", "reduce-scatter", axes, whole, times, "backward")
        if way.how in ("ring", "usp"):
            ring, kind = self.sep // way.inner, "collective-permute"
            for phase in PHASES:
                yield self._term("ring attention", kind, axes, 2 * keys, times * (ring - 1), phase)
            yield self._term("ring attention, gradients", kind, axes, 2 * summed, times * (ring - 1), "backward")
        if self.plan.sep_order == "zigzag" and not self.work.is_order_free:
            moved = moved_share(self.sep) * (2 * query + 2 * keys)
            for phase in PHASES:
                yield self._term("into zigzag and back", "collective-permute", axes, moved, times, phase)

    def experts(self) -> Iterator[Term]:
        axes, k = self.expert_axes, self.work.experts_per_token
        listed, is_even = k, self.work.tokens_per_expert > 0
        if is_even:  # of each token it is said which experts chose it
            listed, k = self.work.experts, self.work.experts * self.work.tokens_per_expert / self.work.seq
        ways = math.prod(self.mesh.degree(axis) for axis in axes)
        # not every layer has experts: each that does has one "up"
        layers = sum("expert" in p.uses and p.is_home and p.name.endswith(".up") for p in self.work.parameters)
        times = layers * self.microbatches
        if self.is_tensor_parallel and self.work.experts and "mp" not in axes:
            yield self._term("gradients of gates", "all-reduce", ("mp",), self.tokens * 4 * listed, times, "backward")
        if ways == 1 or not self.work.experts:
            return
        # axes that split no token elsewhere split them here
        apart = math.prod(self.mesh.degree(axis) for axis in axes if axis not in self.token_axes)
        parts = self.plan.overlap.moe
        tokens, times = self.tokens / apart / parts, times * parts
        width = self.work.hidden * self.work.itemsize
        how = self.plan.expert_dispatcher(ways, math.ceil(k), self.compiler.has_ragged)
        if how == "balanced":
            yield from self._balanced(axes, ways, tokens, times)
            return
        if how == "gather":
            inputs, results = ways * tokens * width, ways * tokens * self.work.hidden * 4
            summed = ways * tokens * self.act_summed / self.tokens
            for name, size in (
                ("tokens", inputs),
                ("choices", ways * tokens * 4 * listed),
                ("gates", ways * tokens * 4 * listed),
            ):
                yield self._term(f"{name} for experts", "all-gather", axes, size, times, "forward")
            yield self._term("tokens from experts", "reduce-scatter", axes, results, times, "forward")
            yield self._term("gradients for experts", "all-gather", axes, results, times, "backward")
            yield self._term("gradients from experts", "reduce-scatter", axes, summed, times, "backward")
            yield self._term(
                "gradients of gates", "reduce-scatter", axes, ways * tokens * 4 * listed, times, "backward"
            )
            return
        if how == "ragged":
            for phase in ("forward", "backward"):
                rows = tokens * k * width
                yield self._term("rows for experts and back", "ragged-all-to-all", axes, rows, 2 * times, phase)
            yield self._term("numbers of rows", "all-gather", axes, ways * self.work.experts * 4, times, "forward")
            return
        rows = tokens * width * (k if is_even else ways * min(k, self.work.experts / ways))
        for phase in ("forward", "backward"):
            yield from self._to_all("rows for experts and back", rows, 2 * times, phase)
        yield from self._to_all("numbers of rows", self.work.experts * 4, times, "forward")

    def _balanced(self, axes: tuple[str, ...], ways: int, tokens: float, times: int) -> Iterator[Term]:
        experts, width = self.work.experts, self.work.hidden * self.work.itemsize
        slots = RelaySlots.of(round(tokens * min(self.work.experts_per_token, experts)), ways)
        for name, rows in (("relays", slots.first * ways), ("experts", slots.second * ways)):
            for phase in ("forward", "backward"):
                yield from self._to_all(f"rows for {name} and back", rows * width, 2 * times, phase)
        ways_of_rows, numbers = slots.first * ways * 4, (slots.first + slots.second) * ways * 4
        yield from self._to_all("ways of rows", ways_of_rows, times, "forward")
        yield from self._to_all("experts of rows", numbers, times, "forward")
        yield self._term("numbers of rows", "all-gather", axes, ways * experts * 4, times, "forward")
        at_a_time = expert_slots(experts // ways, ways) * ways / experts
        low, layers = self.compiler.reduces_low, self.work.num_layers
        for p in self.work.parameters:
            if "expert" not in p.uses:
                continue
            nbytes = self._bytes(p, "use") / p.itemsize * (self.work.itemsize if low else max(4, self.work.itemsize))
            for phase, runs in (("forward", 2), ("backward", 3)):
                yield self._term(
                    "weights of hot experts", "all-reduce", axes, nbytes * at_a_time, runs * times // layers, phase
                )

    def pipeline(self) -> Iterator[Term]:
        if self.work.stage is None:
            return
        stages, here = self.plan.stage_of_chunk, self.work.stage
        hops = list(itertools.pairwise(stages))
        onward = sum(a == here != b for a, b in hops) * self.microbatches
        back = sum(b == here != a for a, b in hops) * self.microbatches
        piece = self.tokens * self.work.hidden * (self.work.sent_itemsize or self.work.itemsize)
        piece /= self.mesh.mp if self.is_sequence_parallel else 1
        yield self._send("activations", piece, onward, "forward")
        yield self._send("gradients of activations", piece, back, "backward")
        for p in self.work.parameters:
            if p.name in self.work.sharers:
                yield self._send("shared parameters", self._bytes(p, "param"), 1, "forward")
            if not p.is_home:
                # microbatches are added up in 32 bits (master gradients)
                grad = self._bytes(p, "grad") / p.itemsize * max(4, p.grad_itemsize)
                yield self._send("gradients of shared parameters", grad, 1, "backward")

    def scalars(self) -> Iterator[Term]:
        if self.is_last:
            yield self._term("loss", "all-reduce", self.token_axes, 2 * SCALAR_BYTES, self.microbatches, "forward")
        for p in self.work.parameters if self.work.norms else ():
            for axes in self._splits(p, "state") if p.is_home else ():
                yield self._term("global norm", "all-reduce", axes, SCALAR_BYTES, self.work.norms, "update")

    def _to_all(self, name: str, payload: float, times: int, phase: str) -> Iterator[Term]:
        """An all-to-all between the experts' devices: of the whole payload along each level."""
        axes = self.plan.expert_axes
        is_flat = self.plan.expert_all_to_all != "two_level"
        for level in (axes,) if is_flat else (axes[1:], axes[:1]):
            yield self._term(name, "all-to-all", level, payload, times, phase)

    def _term(self, name: str, kind: str, axes: Sequence[str], payload: float, times: int, phase: str) -> Term:
        live = self._live(axes)
        size = math.prod(self.mesh.degree(a) for a in live)
        return Term(name, kind, live, payload if size > 1 else 0, times, phase, size)

    @staticmethod
    def _send(name: str, payload: float, times: int, phase: str) -> Term:
        return Term(name, "send", ("pp",), payload, times, phase, 2)

    def _live(self, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(a for a in self.mesh.order if a in axes and self.mesh.degree(a) > 1)

    def _bytes(self, p: ParameterShape, kind: str) -> float:
        """Bytes of the piece on one device."""
        return math.prod(p.shape) * p.itemsize / math.prod(self.mesh.degree(a) for a in self._axes(p, kind))

    def _splits(self, p: ParameterShape, kind: str) -> list[tuple[str, ...]]:
        """The axes of each dim that is split."""
        entries = getattr(self.plan.strategy, f"{kind}_spec")(p.dims, p.shape, self.mesh)
        return [(entry,) if isinstance(entry, str) else tuple(entry) for entry in entries if entry]

    def _axes(self, p: ParameterShape, kind: str) -> tuple[str, ...]:
        return tuple(axis for axes in self._splits(p, kind) for axis in axes)

    def _is_split(self, p: ParameterShape, axis: str, kind: str) -> bool:
        return axis in self._axes(p, kind)
