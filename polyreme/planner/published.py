"""A row that describes a training run, as published tables do, for predict; with defaults for what it leaves out.

Columns: COLUMNS. A cell that is empty, "?", "n/a" or "-" is not known; "yes?" and "1?" are read as "yes" and "1". What
is not known and chosen here is told in Run.assumed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from polyreme.errors import ConfigError
from polyreme.mesh import ANY, Plan, Strategy, default_schedule, nearest_divisor
from polyreme.planner.cluster import Cluster
from polyreme.planner.devices import cluster_of_kind, possible_slices, relative, unknown_kind
from polyreme.planner.frameworks import FRAMEWORKS, IDLE_OF_DEEPSPEED, Framework, framework
from polyreme.planner.graph import PipelineCut
from polyreme.planner.model_shape import ModelShape
from polyreme.planner.predict import predict, times_of
from polyreme.planner.prediction import Prediction, Training
from polyreme.planner.published_cells import Cells
from polyreme.planner.published_models import of_name
from polyreme.planner.published_words import CAPACITY, not_divided, not_modelled, taken_otherwise

COLUMNS = (
    *("id", "system", "date", "source", "model", "params_b", "h", "layers", "heads", "kv_heads", "head_dim", "ffn"),
    *("gated_mlp", "vocab", "seq", "experts", "topk", "moe_ffn", "hardware", "peak_bf16_tflops", "hbm_gb", "n_dev"),
    *("dp", "zero_or_fsdp", "tp", "sp", "pp", "vpp", "cp", "ep", "mbs", "gbs", "recompute", "dtype", "tokens_s_dev"),
    *("tflops_dev", "flops_convention", "mfu_pct", "mem_gib", "mem_metric", "step_s", "evidence", "notes", "quality"),
    "framework",
)
"""Columns that a row may have. Those after dtype are what was measured: of them only the notes, which formula the table
counts FLOP by, and the framework (one of FRAMEWORKS, where the system does not name it) are looked at to predict."""

_ALSO = {
    **dict.fromkeys(("device", "gpu", "gpu_type", "accelerator", "topology", "kind"), "hardware"),
    **dict.fromkeys(("devices", "gpus", "num_gpus", "num_devices", "chips", "n_gpus"), "n_dev"),
    **dict.fromkeys(("batch", "batch_size", "global_batch", "global_batch_size"), "gbs"),
    **dict.fromkeys(("microbatch", "micro_batch", "micro_batch_size"), "mbs"),
    **dict.fromkeys(("hidden", "hidden_size", "d_model"), "h"),
    **dict.fromkeys(("num_layers", "depth"), "layers"),
    **dict.fromkeys(("zero", "fsdp", "zero_stage", "sharding"), "zero_or_fsdp"),
    **dict.fromkeys(("precision", "amp"), "dtype"),
    **dict.fromkeys(("mp", "tensor_parallel"), "tp"),
    "sequence_length": "seq",
}
"""What others call a column."""

_ORDER = ("pp", "dp", "sharding", "ep", "sep", "mp")
"""Devices of published runs: tensor parallelism inside a node, pipelines outermost (Megatron-LM's order)."""


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """What a row says, as predict takes it.

    assumed: what the row left open, and what was taken. not_understood: what it says that no prediction follows.
    """

    model: ModelShape
    plan: Plan
    cluster: Cluster
    batch: int
    training: Training
    assumed: Mapping[str, object]
    not_understood: tuple[str, ...] = ()

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
    degrees, folded, cluster = _degrees(cells, model.hidden)
    # what is described did run: all of the memory but the runtime's counts
    cluster = replace(cluster, device=replace(cluster.device, usable=max(cluster.device.usable, _USABLE)))
    training = _training(cells, cluster.device.flops)
    runs = [
        PublishedRun(model, plan, cluster, batch, _of_plan(training, model, plan, recompute), {})
        for plan, batch, recompute in _candidates(cells, model, degrees, folded)
    ]
    best = runs[0] if len(runs) == 1 else _fastest_that_fits(runs)
    assumed = _choices(cells, best) | cells.assumed
    otherwise = (*taken_otherwise(cells, assumed), *not_divided(model, best.plan))
    lost = tuple(dict.fromkeys((*cells.not_understood, *otherwise, *not_modelled(cells))))
    return replace(best, assumed=assumed, not_understood=lost)


def _of_plan(training: Training, model: ModelShape, plan: Plan, recompute: _Recompute) -> Training:
    cut = _cut(model.layers, len(plan.stage_of_chunk))
    return replace(training, cut=cut, cheap=recompute.cheap, away=recompute.is_away)


def _cut(layers: int, chunks: int) -> PipelineCut:
    """How so many layers are cut: evenly; or, where it takes that to make them even, with the embedding and the head in
    the place of a layer each, as of Llama 3 405B (arXiv:2407.21783, section 3.3.2); else as a user says by hand."""
    if layers % chunks == 0:
        return "layers"
    return "items" if (layers + 2) % chunks == 0 else "balanced"


_USABLE = 0.97
"""Share of a device's memory that a run which is tuned to it fills: 77 of 80 GB are seen in published tables."""


def columns_not_read(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Columns of a row that are none of COLUMNS, each with the nearest that is.

    >>> columns_not_read({"h": 512, "layer": 8, "remark": "a"})
    ("'layer'; did you mean 'layers'?", "'remark'")
    >>> columns_not_read({"gpus": 8})
    ("'gpus'; did you mean 'n_dev'?",)
    """
    not_read = []
    for column in (column for column in row if column not in COLUMNS):
        named = _ALSO.get(str(column).lower())
        near = [named] if named else get_close_matches(str(column), COLUMNS, 1)
        not_read.append(f"{column!r}; did you mean {near[0]!r}?" if near else f"{column!r}")
    return tuple(not_read)


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
        "recompute": plan.recompute
        + (f" of {plan.recompute_share:g} of the layers" if plan.recompute_share != 1 else "")
        + (", and norms and activation functions" if run.training.cheap else ""),
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
    sparse = {"expert_ffn": cells.number("moe_ffn") or wide}
    if experts:
        sparse["experts_per_token"] = cells.take("topk", 2)
    fields: dict[str, Any] = {
        "name": cells.text("model") or "transformer",
        "hidden": h,
        "layers": layers,
        "heads": heads,
        "seq": cells.take("seq", 2048),
        "vocab": cells.take("vocab", 32000 if is_gated else 51200),
        "ffn": wide,
        "kv_heads": cells.number("kv_heads") or heads,
        "head_dim": cells.number("head_dim") or 0,
        "gated": is_gated,
        "experts": experts,
        **(sparse if experts else {}),
        "rms_norm": is_gated,
        "biases": not is_gated,
        "learned_positions": not is_gated,
        "tied": not is_gated,
        "dropout": not is_gated and cells.year < _FUSED,
    }
    return ModelShape(**fields | _of_name(cells, fields))


def _of_name(cells: Cells, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the model's name tells beyond the columns, and the words of the notes; told as assumed."""
    named, source = of_name(str(fields["name"]))
    told = {"ffn": "ffn", "expert_ffn": "moe_ffn", "gated": "gated_mlp"}
    named = {key: value for key, value in named.items() if not (key in told and cells.text(told[key]))}
    if not fields["experts"]:
        named = {key: value for key, value in named.items() if "expert" not in key and key != "dense_layers"}
    if cells.has("mtp"):
        named["ahead"] = 1
    match = re.search(r"(\d+) shared expert", cells.words)
    if match and fields["experts"]:
        named["shared_experts"] = int(match[1])
    match = re.search(r"(?:first )?(\d+) dense layer", cells.words)
    if match and fields["experts"]:
        named["dense_layers"] = int(match[1])
    capacity = CAPACITY.search(cells.words)
    if capacity and fields["experts"]:  # each expert has as many rows, filled or not
        rows = float(capacity[1]) * fields["seq"] * fields["experts_per_token"] / fields["experts"]
        named["tokens_per_expert"] = math.ceil(rows)
    if named.get("kv_rank"):
        named["kv_heads"] = fields["heads"]
    if _is_packed(cells) and not cells.denies("packing"):
        named["document"] = min(fields["seq"], _DOCUMENT)
    if named:
        cells.assumed["model"] = ", ".join(f"{key} {value}" for key, value in named.items()) + f" ({source or 'notes'})"
    return named


_DOCUMENT = 512
"""Tokens of a document of a packed row, where rows do not tell: answered questions (SQuAD) have 100 to 400,
conversations more."""


def _is_packed(cells: Cells) -> bool:
    """Whether rows hold several documents that do not see each other; NeMo's recipes of fine-tuning pack them."""
    return cells.has("packed", "packing") or (cells.has("sft", "lora", "fine-tun") and _framework(cells).name == "nemo")


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
"""From when runs are taken to use bucketed reduction beside the backward, and no dropout; of Framework.fused fused
attention (arXiv:2205.14135 was in the large frameworks by then)."""

_ATTENTION_KERNELS = ("flash", "splash", "pallas", "cudnn", "xformers", "memory-efficient attention", "fa2", "fa3")
"""Words of a row whose attention is fused, whatever its year."""


_ASYNCHRONOUS = 2022.0
"""From when sums of input gradients are taken to run beside weight gradients (arXiv:2205.05198, section 6)."""


def _training(cells: Cells, flops: Mapping[str, float]) -> Training:
    text = cells.text("dtype").lower()
    dtype = _dtype(text)
    if dtype not in flops:
        dtype = cells.assumed["dtype"] = "bfloat16" if not dtype and "bfloat16" in flops else next(iter(flops))
    used, is_tpu = _framework(cells), _is_tpu(cells)
    is_fused = (cells.year >= used.fused or cells.has(*_ATTENTION_KERNELS)) and not cells.denies("flash")
    is_own = cells.year >= used.own_from
    overlap = _beside(cells, used, is_tpu) if cells.year >= _FUSED else ()
    if cells.year >= _ASYNCHRONOUS:
        overlap = (*overlap, "mp_grad")
    # XLA for TPUs runs collectives in pieces beside the products they feed; Megatron-LM does where it says so
    is_told = cells.has("tp-comm-overlap", "tp comm overlap", "userbuffer", "async tp", "asynctp")
    if is_tpu or is_told or (is_own and "mp" in used.beside):
        overlap = (*overlap, "mp")
    if cells.has("dualpipe", "a2a overlap", "ep overlap", "overlap-moe", "moe overlap", "all-to-all overlap"):
        overlap = (*overlap, "ep")
    if is_tpu:  # the sum between slices runs after the backward
        overlap = tuple(axis for axis in overlap if axis != "dp")
    # NeMo's and Megatron-Bridge's recipes send rows by DeepEP since 2025-06
    is_flex = used.name == "nemo" and cells.year >= _DEEPEP
    low = "float4" if "fp4" in text else "float8" if any(word in text for word in ("fp8", "float8", "int8")) else ""
    if low == "float4" and low not in flops:
        cells.not_understood.append(f"dtype {text!r}: the device has no such products, 8 bits are taken")
        low = "float8"
    elif low and low not in flops:
        cells.not_understood.append(f"dtype {text!r}: the device has no such products, {dtype} is taken")
    return Training(
        dtype=dtype,
        products=low if low in flops else "",
        attention="fused" if is_fused else "plain",
        # XLA and float16 sum gradients as they are computed; bfloat16 elsewhere in float32
        gradients=2 if dtype == "float16" else used.gradients,
        cut="layers",
        overlap=overlap,
        prunes=used.prunes,
        fusion=used.fusion,
        keeps=used.memory,
        flash=1 if cells.year < _SECOND_FLASH else 3 if is_own else 2,
        trains="adapters" if cells.has("lora") else "all",
        copies="nodes" if cells.has("deepep", "hybridep", "hai-llm", "dualpipe") or is_flex else "rows",
        sync=used.sync,
        each_expert=used.each_expert,
        narrow=used.narrow and dtype != "float32",
        casts=used.casts,
        adapted=used.adapted,
        tuned=used.tuned and is_own,
        idle=IDLE_OF_DEEPSPEED if cells.has("deepspeed", "neox") else 0.0,
        seen=_SEEN.match(cells.text("system").lower()) is not None,
    )


_BESIDE = ("overlap", "latency hiding", "pgle")
"""Words of a row whose collectives over data run beside arithmetic."""


def _beside(cells: Cells, used: Framework, is_tpu: bool) -> tuple[str, ...]:
    """Axes of data whose collectives run beside arithmetic: as the framework does by itself, or is said to. XLA for
    GPUs does with its latency-hiding scheduler, which is off unless asked for."""
    is_asked = cells.has(*_BESIDE) and not cells.denies("overlap")
    stage, _ = _sharding(cells)
    by_itself = is_tpu if used.name == "xla" else "dp" in used.beside and not 0 < stage < used.from_stage
    return ("dp", "sharding") if is_asked or (by_itself and not cells.denies("overlap")) else ()


_SEEN = re.compile(r"nemo(?! automodel)|megatron-(?:lm|core)|maxtext|llm-foundry|paddle(?:nlp|fleetx)")
"""Systems whose makers' runs set constants of this package; runs of others were 17% to 21% slower than predicted on the
median (benchmarks/results/planner_published_2026-11-27.md)."""

_DEEPEP = 2025.4


_SECOND_FLASH = 2023.55
"""From when fused attention is taken to be FlashAttention-2 (arXiv:2307.08691, 2023-07)."""


def _is_tpu(cells: Cells) -> bool:
    return cells.text("hardware").lower().startswith("tpu")


_OF_TORCH = ("compiled torch", "torch with kernels")


def _framework(cells: Cells) -> Framework:
    """That of the column framework, or that the row names, its system before its notes; one that is not known is taken
    for PyTorch, which is told."""
    if cells.text("framework"):
        return framework(cells.text("framework"))
    system = cells.text("system").lower()
    by_system = (known for known in FRAMEWORKS if system and any(word in system for word in known.words))
    named = next(by_system, None) or next((known for known in FRAMEWORKS if cells.has(*known.words)), None)
    if named is not None and named.name == "torch":  # with what it was said to run
        return next((framework(name) for name in _OF_TORCH if cells.has(*framework(name).words)), named)
    if named is not None:
        return named
    cells.assumed["framework"] = "torch"
    if system:
        cells.not_understood.append(f"system {cells.text('system')!r}: no framework that is known; PyTorch is taken")
    return framework("torch")


def _dtype(text: str) -> str:
    """Of the arithmetic, "" if the text does not say; in 8 bits what stands beside the products is bfloat16."""
    if "fp16" in text or re.search(r"(?<!b)float16", text):
        return "float16"
    if re.match(r"(fp|tf|float)32\b", text) and "16" not in text:
        return "float32"
    low = ("bf16", "bfloat16", "fp8", "float8", "int8", "fp4", "mxfp")
    return "bfloat16" if any(word in text for word in low) else ""


_COMPILED = framework("xla").words
"""Words in notes or system: compiled whole by XLA."""


def _recompute(cells: Cells) -> _Recompute | None:
    """What a row tells of recompute; None if nothing."""
    text = cells.text("recompute").lower()
    if not text:  # whole layers are the default of MaxText, which its configurations for GPUs change
        return _Recompute("full") if cells.has("maxtext") and _is_tpu(cells) else None
    counted = cells.text("flops_convention").lower()
    if "shipped" in text and "full-recompute" in counted:
        text = "full"  # the table counts a second forward; what a configuration file has says less of the run
        cells.assumed["recompute"] = "full, as the table counts FLOP"
    if re.match(r"(no|not|without|w/o|none|false|off)\b", text) or text == "0":
        return _Recompute("none")
    share = re.search(r"(\d+) ?(?:of|/) ?(\d+) layers", text)
    if share and 0 < int(share[1]) <= int(share[2]):
        return _Recompute("full", int(share[1]) / int(share[2]))
    if re.search(r"\b\d+ layers", text):
        cells.not_understood.append(f"recompute {text!r}: of how many layers is not told, as in '12 of 80 layers'")
    for words, value in _RECOMPUTES:
        if any(word in text for word in words):
            return value
    parts = [word for word in _SMALL_PARTS if word in text]
    if parts:
        return _Recompute("none", cheap=True)
    cells.not_understood.append(f"recompute {text!r}: not known; the fastest that fits is taken")
    return None


class _Recompute(NamedTuple):
    """As in Plan and Training; is_away: whether what is kept of a layer lies in the host's memory."""

    mode: str
    share: float = 1.0
    cheap: bool = False
    is_away: bool = False


_RECOMPUTES = (
    (("full_attn",), _Recompute("full_attn")),
    # every second layer, or every second product of each (arXiv:2410.06511, section 2.1.3)
    (("selective layer", "selective(layer", "every second layer", "every other layer"), _Recompute("full", 0.5)),
    (("selective op", "selective(op", "op_sac", "selective ac"), _Recompute("full", 0.5, cheap=True)),
    (("minimal_offload",), _Recompute("none", cheap=True, is_away=True)),  # products go to the host
    (("minimal",), _Recompute("core_attn", cheap=True)),
    (("core_attn", "selective", "attention"), _Recompute("core_attn")),
    (("offload",), _Recompute("full", is_away=True)),
    (("except", "custom"), _Recompute("full")),  # most products again
    (("save_dot", "save_qkv", "dots"), _Recompute("core_attn", cheap=True)),
    (("moe_act", "activation function", "rmsnorm", "layernorm", "swiglu"), _Recompute("none", cheap=True)),
    (("full", "yes", "true", "uniform", "block", "activation", "1"), _Recompute("full")),
)
"""Words of what is computed again, the first that a row has."""

_SMALL_PARTS = ("norm", "up-projection", "up_proj", "mla", "moe_act", "activation function", "swiglu", "gelu", "router")
"""Parts of a layer that cost little to compute again, of which a plan's recompute knows nothing."""


def _degrees(cells: Cells, hidden: int) -> tuple[dict[str, int], tuple[str, ...], Cluster]:
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
    folded: tuple[str, ...] = ("ep",)
    is_folded = degrees["mp"] > 1 and not cells.has(*_COMPILED)  # each device's part of a sequence goes by itself
    if ep > 1 and not apart and (rest % ep or is_folded):
        ep, folded = _fold(cells, degrees, rest, ep)
    data = rest // ep
    if ways is None or data % ways:  # ZeRO over the whole group; with a dp told besides, over what that leaves
        ways = data // told if told and data % told == 0 and 1 < told < data else data
    if told is not None and told * ways * ep != rest and told != rest:
        cells.assumed["dp"] = data // ways
    # optimizers and FSDP cut flat buffers into any number of parts; a Strategy cuts dims: the most parts that divide
    ways = math.gcd(ways, hidden)
    degrees |= {"dp": data // ways, "sharding": ways, "ep": ep, "stage": stage}
    return degrees, folded, _cluster(cells, total)


def _fold(cells: Cells, degrees: Mapping[str, int], rest: int, ep: int) -> tuple[int, tuple[str, ...]]:
    """(degree of ep, axes of the experts) where experts are split over tensor- or context-parallel devices too, as
    Megatron-Core's folding does (arXiv:2504.14960); the most that divides where none do, which is told."""
    for axes in (("mp",), ("sep",), ("sep", "mp")):
        inner = math.prod(degrees[axis] for axis in axes)
        if inner > 1 and ep % inner == 0 and rest % (ep // inner) == 0:
            return ep // inner, (*axes, "ep")
    if rest % ep == 0:
        return ep, ("ep",)
    used = math.gcd(rest, ep)
    cells.assumed["ep"] = used
    cells.not_understood.append(
        f"ep {ep}: does not divide the {rest} data-parallel ranks, nor with tp or cp; {used} is taken"
    )
    return used, ("ep",)


def _sharding(cells: Cells) -> tuple[int, int | None]:
    """ZeRO stage (0: none) and its degree, None for that of the data-parallel group."""
    text = cells.text("zero_or_fsdp").lower().replace(" ", "").replace("_", "")
    if text in ("", "0", "no", "none", "ddp", "false", "zero0"):
        return 0, 1
    match = re.search(r"(?:deg|degree|fsdp|sdp|x|:)=?(\d+)", text)
    degree = int(match[1]) if match else None
    if degree == 1 and (cells.number("cp") or 1) == 1:  # a context-parallel group shards what it repeats
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
        sizes = [math.prod(each) for each in possible_slices(name)] or [total]
    except ConfigError:
        if not peak:
            raise
        cells.assumed["hardware"] = f"{name!r} is not known: curves of {relative(name)}, peak and memory of the row"
        cells.not_understood.append(f"hardware {cells.assumed['hardware']}")
        return unknown_kind(name, total, peak * 1e12, (memory or 80) * 1e9)
    least = max(slices, -(-total // sizes[-1]))
    while total % slices or total // slices not in sizes:
        slices += 1
    if slices > least:
        cells.assumed["n_dev"] = f"{slices} slices of {total // slices}"
    return _with_network(cells, cluster_of_kind(name, total, slices=slices))


def _with_network(cells: Cells, cluster: Cluster) -> Cluster:
    """The cluster with the machines and network cards that the notes tell: "4 GPUs a node", "4 x 100 Gbit/s a node", or
    "400 Gb/s per GPU"."""
    if len(cluster.links) > 1 and (told := _PER_NODE.search(cells.words)) and int(told[1]):
        near = replace(cluster.links[-2], devices=int(told[1]))
        cluster = replace(cluster, links=(*cluster.links[:-2], near, cluster.links[-1]))
    match = re.search(
        r"(?:(\d+) ?x ?)?(\d+) ?(?:gbit/s|gb/s|gbps)[^,;.]*?\b(?:a|per|each) (node|gpu|device)", cells.words
    )
    if not match or len(cluster.links) < 2:
        return cluster
    near, far = cluster.links[-2:]
    bits = int(match[1] or 1) * int(match[2]) * 1e9 / (near.devices if match[3] == "node" else 1)
    return replace(cluster, links=(*cluster.links[:-1], replace(far, bandwidth=bits / 8)))


_PER_NODE = re.compile(r"\b(\d+) ?(?:gpu|npu|device|accelerator|card)s? (?:a|per|each) (?:node|machine|host|server)")

_OPEN_RECOMPUTE = [
    _Recompute("none"),
    _Recompute("none", cheap=True),
    _Recompute("core_attn"),
    _Recompute("full_attn"),
    *(_Recompute("full", share) for share in (0.25, 0.5, 0.75, 1.0)),
]
"""What a row that does not tell its recompute may have had."""


def _candidates(
    cells: Cells, model: ModelShape, degrees: Mapping[str, int], folded: tuple[str, ...]
) -> Iterator[tuple[Plan, int, _Recompute]]:
    ways, pp = degrees["dp"] * degrees["sharding"] * degrees["ep"], degrees["pp"]
    per_stage = (model.layers if model.layers % pp == 0 else model.layers + 2) // pp
    virtual = min(cells.number("vpp") or 0, per_stage)
    if virtual and virtual < cells.need("vpp") and pp > 1:
        cells.assumed["vpp"] = virtual
    if not virtual and pp > 1:
        least = 2 if "interleav" in cells.text("vpp").lower() or cells.has("interleaved") else 1
        whole = [v for v in range(least, min(per_stage, 8) + 1) if per_stage % v == 0]
        chunks = whole or list(range(1, min(per_stage, 8) + 1))
    else:
        chunks = [virtual if pp > 1 else 1]
    recompute = _recompute(cells)
    kinds = [recompute] if recompute else _OPEN_RECOMPUTE
    # MaxText cuts the residual stream over its tensor axis, by embed: the same bytes as by seq
    is_whole = cells.is_yes("sp") or cells.has("maxtext")
    for batch, rows in _batches(cells, ways, pp):
        for chunk, kind in itertools.product(chunks, kinds):
            plan = Plan.from_degrees(
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
                recompute=kind.mode,
                recompute_share=kind.share,
                sep_attention="ulysses" if cells.has("ulysses") else "ring",
                expert_axes=folded,
                # frameworks send the rows there are, or drop what is above a capacity: no room for more
                expert_dispatch="ragged" if degrees["ep"] > 1 or len(folded) > 1 else "auto",
                order=_ORDER,
            )
            yield _sharded_over_data(plan, degrees["stage"]), batch, kind


def _sharded_over_data(plan: Plan, stage: int) -> Plan:
    """Ranks of a context-parallel group hold the same weights, and those of an expert-parallel one the same of all but
    experts; frameworks shard state over them as over replicas (Megatron-Core's distributed optimizer, FSDP over a mesh
    of both). What ZeRO shards besides goes over context-parallel ranks."""
    live = [axis for axis in ("sep", "ep") if plan.mesh.degree(axis) > 1]
    if not stage or not live:
        return plan
    near = ("sharding", *(axis for axis in live if axis == "sep"))
    splits = {"state": (1, ("sharding", *live)), "grad": (2, near), "param": (3, near)}
    rules = {
        kind: {**plan.strategy.rule(kind), **({ANY: axes} if stage >= least else {})}
        for kind, (least, axes) in splits.items()
    }
    return replace(plan, strategy=Strategy(act=plan.strategy.rule("act"), **rules))


_AS_STAGES = ("torchtitan",)
"""Words of what cuts a batch into as many microbatches as a pipeline has devices, unless told (torchtitan,
pipeline_parallel_microbatches: "the number of pipeline stages, if unspecified")."""


def _batches(cells: Cells, ways: int, stages: int) -> list[tuple[int, int]]:
    """(batch, samples of a microbatch on one data-parallel rank) to consider."""
    batch, rows, devices = cells.number("gbs"), cells.number("mbs"), cells.need("n_dev")
    powers = [1, 2, 4, 8, 16, 32, 64]
    if batch and not rows and stages > 1 and cells.has(*_AS_STAGES) and batch % (ways * stages) == 0:
        rows = cells.assumed["mbs"] = batch // (ways * stages)
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
