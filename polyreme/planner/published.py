"""A row that describes a training run, as published tables do, for predict; with defaults for what it leaves out.

are read as "yes" and "1". What is not known and chosen here is told in Run.assumed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from polyreme.errors import ConfigError
from polyreme.mesh import Plan, default_schedule, nearest_divisor
from polyreme.planner.cluster import Cluster
from polyreme.planner.devices import cluster_of_kind, most_in_a_slice, unknown_kind
from polyreme.planner.model_shape import ModelShape
from polyreme.planner.predict import predict, times_of
from polyreme.planner.prediction import Prediction, Training
from polyreme.planner.published_cells import Cells

COLUMNS = (
    *("id", "system", "date", "source", "model", "params_b", "h", "layers", "heads", "kv_heads", "head_dim", "ffn"),
    *("gated_mlp", "vocab", "seq", "experts", "topk", "moe_ffn", "hardware", "peak_bf16_tflops", "hbm_gb", "n_dev"),
    *("dp", "zero_or_fsdp", "tp", "sp", "pp", "vpp", "cp", "ep", "mbs", "gbs", "recompute", "dtype", "tokens_s_dev"),
    *("tflops_dev", "flops_convention", "mfu_pct", "mem_gib", "mem_metric", "step_s", "evidence", "notes", "quality"),
)
"""Columns that a row may have. Those after dtype are what was measured: of them only the notes, and which formula the
table counts FLOP by, are looked at to predict."""

_ORDER = ("pp", "dp", "sharding", "ep", "sep", "mp")
"""Devices of published runs: tensor parallelism inside a node, pipelines outermost (Megatron-LM's order)."""


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """What a row says, as predict takes it; assumed: what the row left open, and what was taken."""

    model: ModelShape
    plan: Plan
    cluster: Cluster
    batch: int
    training: Training
    assumed: Mapping[str, object]

    def seconds(self) -> float:
        """Of a step."""
        return times_of(self.model, self.plan, self.cluster, self.batch, self.training).total

    def predict(self) -> Prediction:
        """The prediction."""
        return predict(self.model, self.plan, self.cluster, self.batch, self.training)


def run_of(row: Mapping[str, Any]) -> PublishedRun:
    """The run that a row describes. What it leaves open of batch, microbatch, virtual stages and recompute is what
    predict finds fastest of those that fit the memory.

    A column that is not one of COLUMNS is not read (columns_not_read). Raises ConfigError for a cell that is not of its
    column's kind, and for degrees that do not make the row's number of devices.
    """
    cells = Cells({key: "" if value is None else str(value).strip() for key, value in row.items()})
    model = _model(cells)
    degrees, cluster = _degrees(cells, model.hidden)
    training = _training(cells, cluster.device.flops)
    runs = [
        PublishedRun(model, plan, cluster, batch, training, {}) for plan, batch in _candidates(cells, model, degrees)
    ]
    best = runs[0] if len(runs) == 1 else _fastest_that_fits(runs)
    return replace(best, assumed=_choices(cells, best) | cells.assumed)


def columns_not_read(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Columns of a row that are none of COLUMNS, each with the nearest that is.

    >>> columns_not_read({"h": 512, "layer": 8, "remark": "a"})
    ("'layer'; did you mean 'layers'?", "'remark'")
    """
    found = []
    for column in (column for column in row if column not in COLUMNS):
        near = get_close_matches(str(column), COLUMNS, 1)
        found.append(f"{column!r}; did you mean {near[0]!r}?" if near else f"{column!r}")
    return tuple(found)


def _fastest_that_fits(runs: list[PublishedRun]) -> PublishedRun:
    """The run of most tokens a second whose memory is enough. If none is, the row ran all the same, so memory is
    predicted too high: the fastest of those that need about the least."""
    by_rate = sorted(runs, key=lambda run: run.seconds() / run.batch)
    needs = []
    for run in by_rate:
        found = run.predict()
        if found.fits:
            return run
        needs.append(found.memory.total)
    return next(run for run, need in zip(by_rate, needs, strict=True) if need <= _NEAR_LEAST * min(needs))


_NEAR_LEAST = 1.25
"""Memory over the least of a row's candidates, of those that are taken to need about as much."""


def _choices(cells: Cells, run: PublishedRun) -> dict[str, object]:
    plan = run.plan
    open_to = {
        "gbs": run.batch,
        "mbs": plan.rows_per_device(run.batch),
        "vpp": plan.virtual_stages,
        "recompute": plan.recompute,
    }
    known = {"gbs": cells.number("gbs"), "mbs": cells.number("mbs"), "vpp": cells.number("vpp") or plan.mesh.pp == 1}
    known["recompute"] = _recompute(cells)
    chosen = {
        key: f"{value}, as {cells.text(key)!r} is not known" if cells.text(key) else value
        for key, value in open_to.items()
        if not known[key]
    }
    return {**chosen, "attention": run.training.attention, "overlap": list(run.training.overlap)}


def _model(cells: Cells) -> ModelShape:
    h, layers = cells.number("h") or 0, cells.number("layers") or 0
    if not h or not layers:
        layers, h = _of_size(cells, layers, h)
    experts = cells.number("experts") or 0
    gated = cells.text("gated_mlp").lower()
    is_gated = "glu" in gated or cells.is_yes("gated_mlp") or (not gated and bool(experts))
    wide = cells.number("ffn") or (cells.number("moe_ffn") if experts else 0)
    if not wide:
        # LLaMA's rule: as many numbers in three matrices as two of 4 h have, rounded up to 256
        wide = cells.assumed["ffn"] = -(-8 * h // (3 * 256)) * 256 if is_gated else 4 * h
    heads = cells.number("heads")
    if heads is None:
        heads = cells.take("heads", nearest_divisor(h, max(1, h // 128)))
    return ModelShape(
        name=cells.text("model") or "transformer",
        hidden=h,
        layers=layers,
        heads=heads,
        seq=cells.take("seq", 2048),
        vocab=cells.take("vocab", 32000 if is_gated else 51200),
        ffn=wide,
        kv_heads=cells.number("kv_heads") or heads,
        head_dim=cells.number("head_dim") or 0,
        gated=is_gated,
        experts=experts,
        experts_per_token=cells.take("topk", 2) if experts else 0,
        expert_ffn=(cells.number("moe_ffn") or wide) if experts else 0,
        biases=not is_gated,
        learned_positions=not is_gated,
        tied=not is_gated,
        rms_norm=is_gated,
        dropout=not is_gated and cells.year < _FUSED,
    )


def _of_size(cells: Cells, layers: int, h: int) -> tuple[int, int]:
    """(layers, hidden) of a model of which the number of parameters is known: 12 layers hidden^2 (arXiv:2001.08361)."""
    match = re.match(r"\d+(\.\d*)?", cells.text("params_b"))
    if not match:
        raise ConfigError(
            f"row {cells.label}: columns 'h' and 'layers' are {cells.text('h')!r} and {cells.text('layers')!r}; give "
            "numbers, or params_b"
        )
    count = float(match[0]) * 1e9
    layers = layers or next((n for most, n in ((2e9, 24), (1e10, 32), (3e10, 48), (1e11, 80)) if count <= most), 96)
    h = h or max(1, round((count / (12 * layers)) ** 0.5 / 128)) * 128
    cells.assumed |= {"layers": layers, "h": h}
    return layers, h


_FUSED = 2023.0
"""From when runs are taken to use fused attention (arXiv:2205.14135 was in the large frameworks by then), bucketed
reduction beside the backward, and no dropout."""


_ASYNCHRONOUS = 2022.0
"""From when sums of input gradients are taken to run beside weight gradients (arXiv:2205.05198, section 6)."""


def _training(cells: Cells, flops: Mapping[str, float]) -> Training:
    text = cells.text("dtype").lower()
    dtype = _dtype(text)
    if dtype not in flops:
        dtype = cells.assumed["dtype"] = "bfloat16" if not dtype and "bfloat16" in flops else next(iter(flops))
    is_new = cells.year >= _FUSED or cells.has("flash")
    compiled, is_tpu = cells.has(*_COMPILED), cells.text("hardware").lower().startswith("tpu")
    overlap = ("dp", "sharding") if is_new and not cells.has("paddle") else ()
    if cells.year >= _ASYNCHRONOUS:
        overlap = (*overlap, "mp_grad")
    # XLA for TPUs runs collectives in pieces beside the products they feed; Megatron-LM does where it says so
    if is_tpu or cells.has("tp-comm-overlap", "tp comm overlap", "userbuffer"):
        overlap = (*overlap, "mp")
    if is_tpu:  # the sum between slices runs after the backward
        overlap = tuple(axis for axis in overlap if axis != "dp")
    return Training(
        dtype=dtype,
        products="float8" if ("fp8" in text or "int8" in text) and "float8" in flops else "",
        attention="fused" if is_new else "plain",
        # XLA and float16 sum gradients as they are computed; bfloat16 elsewhere in float32
        gradients=2 if dtype == "float16" or compiled or cells.has("paddle") else 4,
        cut="layers",
        overlap=overlap,
        prunes=compiled,
        fusion="all" if compiled else "layers" if cells.has(*_LAYER_KERNELS) else "none",
    )


def _dtype(text: str) -> str:
    """Of the arithmetic, "" if the text does not say; in 8 bits what stands beside the products is bfloat16."""
    if "fp16" in text or re.search(r"(?<!b)float16", text):
        return "float16"
    if re.match(r"(fp|tf|float)32\b", text) and "16" not in text:
        return "float32"
    return "bfloat16" if any(word in text for word in ("bf16", "bfloat16", "fp8", "int8")) else ""


_COMPILED = ("maxtext", "xla", "jax", "levanter", "tensorflow", "paxml", "t5x")
_LAYER_KERNELS = ("megatron", "nemo", "transformer engine", "compile", "fused", "liger", "fleetx")
"""Words in notes or system: compiled whole by XLA; with kernels made for norms, rotations and activations."""


def _recompute(cells: Cells) -> str | None:
    text = cells.text("recompute").lower()
    if not text:
        return "full" if cells.has("maxtext") else None  # its default
    counted = cells.text("flops_convention").lower()
    if "shipped" in text and "full-recompute" in counted:
        text = "full"  # the table counts a second forward; what a configuration file has says less of the run
        cells.assumed["recompute"] = "full, as the table counts FLOP"
    if re.match(r"(no|not|without|w/o)\b", text):
        return "none"
    for words, value in (
        (("full_attn",), "full_attn"),
        (("selective op", "selective(op", "op_sac", "selective ac"), "full_attn"),  # about half of the products
        (("core_attn", "selective", "minimal", "attention"), "core_attn"),
        (("except", "custom", "offload"), "full"),  # most products again
        (("save_dot",), "core_attn"),
        (("none", "false", "off"), "none"),
        (("full", "yes", "true", "uniform", "block", "activation", "1"), "full"),
        (("no", "0"), "none"),
    ):
        if any(word in text for word in words):
            return value
    cells.assumed["recompute"] = f"{text!r} is not known"
    return None


def _degrees(cells: Cells, hidden: int) -> tuple[dict[str, int], Cluster]:
    total = cells.need("n_dev")
    degrees = {axis: cells.number(column) or 1 for axis, column in (("mp", "tp"), ("pp", "pp"), ("sep", "cp"))}
    inner = degrees["mp"] * degrees["pp"] * degrees["sep"]
    if total % inner:
        raise ConfigError(
            f"row {cells.label}: tp {degrees['mp']} x pp {degrees['pp']} x cp {degrees['sep']} = {inner} does not "
            f"divide n_dev {total}; correct one of them"
        )
    rest, ep = total // inner, cells.number("ep") or 1
    stage, ways = _sharding(cells)
    # experts live on ranks of the data-parallel group, unless the degrees say that they have devices of their own
    told = cells.number("dp")
    apart = told is not None and told * (ways or 1) * ep == rest
    data = rest // ep if ep > 1 and (apart or rest % ep == 0) else rest
    ep = rest // data
    if ways is None or data % ways:  # ZeRO over the whole group; with a dp told besides, over what that leaves
        ways = data // told if told and data % told == 0 and 1 < told < data else data
    if told is not None and told * ways * ep != rest and told != rest:
        cells.assumed["dp"] = data // ways
    # optimizers and FSDP cut flat buffers into any number of parts; a Strategy cuts dims: the most parts that divide
    ways = math.gcd(ways, hidden)
    degrees |= {"dp": data // ways, "sharding": ways, "ep": ep, "stage": stage}
    return degrees, _cluster(cells, total)


def _sharding(cells: Cells) -> tuple[int, int | None]:
    """ZeRO stage (0: none) and its degree, None for that of the data-parallel group."""
    text = cells.text("zero_or_fsdp").lower().replace(" ", "").replace("_", "")
    if text in ("", "0", "no", "none", "ddp", "false", "zero0"):
        return 0, 1
    match = re.search(r"(?:deg|degree|fsdp|sdp|x|:)=?(\d+)", text)
    degree = int(match[1]) if match else None
    if degree == 1:
        return 0, 1
    stage = re.match(r"(?:deepspeed|zero|stage|-)*([123])", text)
    if stage:
        return int(stage[1]), degree
    if not any(word in text for word in ("dist", "optim", "dp", "shard", "zero", "yes", "true")):
        cells.assumed["zero_or_fsdp"] = f"stage 3, as {text!r} is not known"
    return (1 if "dist" in text or "optim" in text else 3), degree


def _cluster(cells: Cells, total: int) -> Cluster:
    name = cells.text("hardware")
    if not name:
        raise ConfigError(f"row {cells.label}: column 'hardware' is not known; name a kind such as A100-80G")
    match = re.search(r"\b(\d+) ?x ?v\d", cells.text("notes").lower())
    slices = int(match[1]) if match and total % int(match[1]) == 0 else 1
    peak, memory = cells.rate("peak_bf16_tflops"), cells.rate("hbm_gb")
    try:
        most = most_in_a_slice(name)
    except ConfigError:
        if not peak:
            raise
        cells.assumed["hardware"] = f"{name!r} is not known: curves of an A100, peak and memory of the row"
        return unknown_kind(name, total, peak * 1e12, (memory or 80) * 1e9)
    while total % slices or total // slices > most:
        slices += 1
    return cluster_of_kind(name, total, slices=slices)


def _candidates(cells: Cells, model: ModelShape, degrees: Mapping[str, int]) -> Iterator[tuple[Plan, int]]:
    ways, pp = degrees["dp"] * degrees["sharding"] * degrees["ep"], degrees["pp"]
    per_stage = model.layers // pp
    virtual = min(cells.number("vpp") or 0, per_stage)
    if not virtual and pp > 1:
        chunks = [v for v in range(1, min(per_stage, 8) + 1) if per_stage % v == 0]
    else:
        chunks = [virtual if pp > 1 else 1]
    recompute = _recompute(cells)
    kinds = [recompute] if recompute else ["none", "core_attn", "full_attn", "full"]
    # MaxText cuts the residual stream over its tensor axis, by embed: the same bytes as by seq
    is_whole = cells.is_yes("sp") or cells.has("maxtext")
    for batch, rows in _batches(cells, ways, pp):
        for chunk, kind in itertools.product(chunks, kinds):
            yield (
                Plan.from_degrees(
                    dp=degrees["dp"],
                    pp=pp,
                    sharding=degrees["sharding"],
                    sep=degrees["sep"],
                    mp=degrees["mp"],
                    ep=degrees["ep"],
                    sharding_stage=degrees["stage"] or 1,
                    sequence_parallel=is_whole and degrees["mp"] > 1,
                    schedule=None if pp == 1 else default_schedule(chunk),
                    virtual_stages=chunk,
                    num_microbatches=batch // (ways * rows),
                    recompute=kind,
                    sep_attention="ulysses" if cells.has("ulysses") else "ring",
                    order=_ORDER,
                ),
                batch,
            )


def _batches(cells: Cells, ways: int, stages: int) -> list[tuple[int, int]]:
    """(batch, samples of a microbatch on one data-parallel rank) to consider."""
    batch, rows, devices = cells.number("gbs"), cells.number("mbs"), cells.need("n_dev")
    powers = [1, 2, 4, 8, 16, 32, 64]
    if rows and stages == 1 and cells.has(*_COMPILED) and (batch is None or rows * devices == batch):
        batch, rows = rows * devices, rows * devices // ways or 1  # told for each device, and never cut
    if batch is None:
        return [
            (microbatch * ways * (4 * stages if stages > 1 else 1), microbatch)
            for microbatch in ([rows] if rows else powers)
        ]
    found = [(batch, microbatch) for microbatch in ([rows] if rows else powers) if batch % (microbatch * ways) == 0]
    if found:
        return found
    microbatch = rows if rows and rows * ways <= batch else 1
    cells.assumed["gbs"] = microbatch * ways * max(1, round(batch / (microbatch * ways)))
    cells.assumed["mbs"] = microbatch
    return [(cells.assumed["gbs"], microbatch)]
