"""A row that describes a training run, as published tables do, for predict; with defaults for what it leaves out.

Floor: 1.  Never imports: jax.  Columns: COLUMNS. A cell that is empty, "?", "n/a" or "-" is not known; "yes?" and "1?"
are read as "yes" and "1". What is not known and chosen here is told in Run.assumed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from polyreme.errors import ConfigError, PlacementError, did_you_mean
from polyreme.mesh import Plan
from polyreme.planner.cluster import Cluster
from polyreme.planner.devices import cluster_of_kind, node_of, unknown_kind
from polyreme.planner.model_shape import ModelShape
from polyreme.planner.predict import predict
from polyreme.planner.prediction import Prediction, Training

COLUMNS = (
    *("id", "system", "date", "source", "model", "params_b", "h", "layers", "heads", "kv_heads", "head_dim", "ffn"),
    *("gated_mlp", "vocab", "seq", "experts", "topk", "moe_ffn", "hardware", "peak_bf16_tflops", "hbm_gb", "n_dev"),
    *("dp", "zero_or_fsdp", "tp", "sp", "pp", "vpp", "cp", "ep", "mbs", "gbs", "recompute", "dtype", "tokens_s_dev"),
    *("tflops_dev", "flops_convention", "mfu_pct", "mem_gib", "mem_metric", "step_s", "evidence", "notes", "quality"),
)
"""Columns that a row may have; those after dtype are what was measured, and never looked at to predict."""

_UNKNOWN = ("", "?", "n/a", "na", "-", "none given", "unknown")

_ORDER = ("pp", "dp", "sharding", "ep", "sep", "mp")
"""Devices of published runs: tensor parallelism inside a node, pipelines outermost (Megatron-LM's order)."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a row says, as predict takes it; assumed: what the row left open, and what was taken."""

    model: ModelShape
    plan: Plan
    cluster: Cluster
    batch: int
    training: Training
    assumed: Mapping[str, object]

    def predict(self) -> Prediction:
        """The prediction."""
        return predict(self.model, self.plan, self.cluster, self.batch, self.training)


def run_of(row: Mapping[str, Any]) -> Run:
    """The run that a row describes. What it leaves open of batch, microbatch, virtual stages and recompute is what
    predict finds fastest of those that fit the memory.

    Raises ConfigError for a column that there is not, for a cell that is not of its column's kind, and for degrees that
    do not make the row's number of devices.
    """
    for column in row:
        if column not in COLUMNS:
            raise ConfigError(f"unknown column {column!r}{did_you_mean(str(column), COLUMNS)}")
    cells = _Cells({key: "" if value is None else str(value).strip() for key, value in row.items()})
    model = _model(cells)
    degrees, cluster = _degrees(cells)
    training = _training(cells)
    runs = [
        Run(model, plan, cluster, batch, training, {}) for plan, batch in _candidates(cells, model, degrees, cluster)
    ]
    if not runs:
        raise ConfigError(
            f"row {cells.label}: no microbatch makes a batch of {cells.text('gbs') or 'any size'} on {degrees}; "
            "check gbs, mbs and the degrees"
        )
    best = runs[0] if len(runs) == 1 else min(runs, key=_preference)
    return replace(best, assumed=cells.assumed | _choices(cells, best))


def _preference(run: Run) -> tuple[bool, float]:
    try:
        found = run.predict()
    except PlacementError:
        return True, float("inf")
    return not found.fits, -found.tokens_per_second if found.fits else found.memory.total


def _choices(cells: _Cells, run: Run) -> dict[str, object]:
    plan = run.plan
    open_to = {
        "gbs": run.batch,
        "mbs": plan.rows_per_device(run.batch),
        "vpp": plan.virtual_stages,
        "recompute": plan.recompute,
    }
    known = {"gbs": cells.number("gbs"), "mbs": cells.number("mbs"), "vpp": cells.number("vpp") or plan.mesh.pp == 1}
    known["recompute"] = _recompute(cells)
    chosen = {key: value for key, value in open_to.items() if not known[key]}
    return {**chosen, "attention": run.training.attention, "overlap": list(run.training.overlap)}


class _Cells:
    """A row's cells, and what was taken where they say nothing."""

    def __init__(self, row: Mapping[str, str]) -> None:
        self._row = row
        self.assumed: dict[str, object] = {}

    @property
    def label(self) -> str:
        """How messages name the row."""
        return self._row.get("id") or self._row.get("model") or "without an id"

    def text(self, column: str) -> str:
        """The cell, "" if not known; a doubtful value is taken."""
        value = self._row.get(column, "")
        value = "" if value.lower() in _UNKNOWN else value
        return value[:-1].strip() if value.endswith("?") else value

    def number(self, column: str) -> int | None:
        """The cell as a whole number. Raises ConfigError for one that starts with something else."""
        text = self.text(column).replace(",", "").replace("_", "")
        if not text:
            return None
        match = re.match(r"\d+(\.\d*)?([eE]\+?\d+)?", text)
        if not match:
            if column == "vpp":  # words, such as "interleaved for large"
                return None
            raise ConfigError(f"row {self.label}: column {column!r} has {text!r}; give a number, or ? if not known")
        return int(float(match[0]))

    def need(self, column: str) -> int:
        """The number that a row must have."""
        value = self.number(column)
        if not value:
            raise ConfigError(f"row {self.label}: column {column!r} is {self._row.get(column, '')!r}; give a number")
        return value

    def take(self, column: str, default: int) -> int:
        """The number, or a default, which is told."""
        value = self.number(column)
        if value is None:
            self.assumed[column] = default
            return default
        return value

    def has(self, *words: str) -> bool:
        """Whether notes, recompute or system mention one of the words."""
        text = " ".join(self._row.get(c, "") for c in ("notes", "recompute", "system", "zero_or_fsdp")).lower()
        return any(word in text for word in words)

    @property
    def year(self) -> float:
        """Of the run, with its month as a part; 2024 if not told."""
        match = re.search(r"(20\d\d)(?:-(\d\d))?", self._row.get("date", ""))
        return int(match[1]) + (int(match[2] or 6) - 1) / 12 if match else 2024.0


def _model(cells: _Cells) -> ModelShape:
    h, layers, heads = cells.need("h"), cells.need("layers"), cells.need("heads")
    is_gated = cells.text("gated_mlp").lower() in ("1", "yes", "true") or (
        not cells.text("gated_mlp") and bool(cells.number("experts"))
    )
    experts = cells.number("experts") or 0
    wide = cells.number("ffn") or (cells.number("moe_ffn") if experts else 0)
    if not wide:
        # LLaMA's rule: as many numbers in three matrices as two of 4 h have, rounded up to 256
        wide = cells.assumed["ffn"] = -(-8 * h // (3 * 256)) * 256 if is_gated else 4 * h
    return ModelShape(
        name=cells.text("model") or "transformer",
        hidden=h,
        layers=layers,
        heads=heads,
        seq=cells.need("seq"),
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


_FUSED = 2023.0
"""From when runs are taken to use fused attention (arXiv:2205.14135 was in the large frameworks by then), bucketed
reduction beside the backward, and no dropout."""


_ASYNCHRONOUS = 2022.0
"""From when sums of input gradients are taken to run beside weight gradients (arXiv:2205.05198, section 6)."""


def _training(cells: _Cells) -> Training:
    text = cells.text("dtype").lower()
    dtype = "float16" if "fp16" in text else "float32" if text in ("fp32", "float32") else "bfloat16"
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
        products="float8" if "fp8" in text else "",
        attention="fused" if is_new else "plain",
        # XLA and float16 sum gradients as they are computed; bfloat16 elsewhere in float32
        gradients=2 if dtype == "float16" or compiled or cells.has("paddle") else 4,
        cut="layers",
        overlap=overlap,
        prunes=compiled,
        fusion="all" if compiled else "layers" if cells.has(*_LAYER_KERNELS) else "none",
    )


_COMPILED = ("maxtext", "xla", "jax", "levanter", "tensorflow", "paxml", "t5x")
_LAYER_KERNELS = ("megatron", "nemo", "transformer engine", "compile", "fused", "liger", "fleetx")
"""Words in notes or system: compiled whole by XLA; with kernels made for norms, rotations and activations."""


def _recompute(cells: _Cells) -> str | None:
    text = cells.text("recompute").lower()
    if not text:
        return "full" if cells.has("maxtext") else None  # its default
    counted = cells.text("flops_convention").lower()
    if "shipped" in text and "full-recompute" in counted:
        text = "full"  # the table counts a second forward; what a configuration file has says less of the run
        cells.assumed["recompute"] = "full, as the table counts FLOP"
    for words, value in (
        (("full_attn",), "full_attn"),
        (("except",), "full"),  # most products again
        (("core_attn", "selective", "minimal", "save_dot", "attention", "offload", "custom"), "core_attn"),
        (("full", "yes", "uniform", "block", "activation"), "full"),
        (("none", "no", "false", "0", "off"), "none"),
    ):
        if any(word in text for word in words):
            return value
    cells.assumed["recompute"] = f"{text!r} is not known"
    return None


def _degrees(cells: _Cells) -> tuple[dict[str, int], Cluster]:
    total = cells.need("n_dev")
    degrees = {axis: cells.number(column) or 1 for axis, column in (("mp", "tp"), ("pp", "pp"), ("sep", "cp"))}
    ep = cells.number("ep") or 1
    stage, ways = _sharding(cells)
    rest = total // (degrees["mp"] * degrees["pp"] * degrees["sep"])
    data = cells.number("dp") or (rest // ways if ways else rest)
    if ways is None:  # ZeRO over the whole data-parallel group
        ways, data = (data, 1) if stage else (1, data)
        if data == 1 and stage and ways != rest and rest % ways == 0:
            data = rest // ways
    if data * ways != rest and rest * ep == data * ways * ep and rest % ways == 0:
        data = rest // ways
    if data * ways * ep != rest and ep > 1 and data * ways == rest:  # experts live on ranks of the data-parallel group
        if data % ep == 0:
            data //= ep
        elif ways % ep == 0:
            ways //= ep
    degrees |= {"dp": data, "sharding": ways, "ep": ep, "stage": stage}
    made = degrees["mp"] * degrees["pp"] * degrees["sep"] * data * ways * ep
    if made != total:
        raise ConfigError(
            f"row {cells.label}: tp {degrees['mp']} x pp {degrees['pp']} x cp {degrees['sep']} x dp {data} x sharding "
            f"{ways} x ep {ep} are {made} devices, n_dev is {total}; correct one of them"
        )
    return degrees, _cluster(cells, total, data)


def _sharding(cells: _Cells) -> tuple[int, int | None]:
    """ZeRO stage (0: none) and its degree, None for that of the data-parallel group."""
    text = cells.text("zero_or_fsdp").lower().replace(" ", "")
    if text in ("", "0", "no", "none", "ddp", "false"):
        return 0, 1
    match = re.search(r"(?:deg|fsdp|x)=?(\d+)", text)
    degree = int(match[1]) if match else None
    stage = re.match(r"(?:zero-?|stage)?([123])", text)
    return (int(stage[1]) if stage else 3), degree


def _cluster(cells: _Cells, total: int, data: int) -> Cluster:
    name = cells.text("hardware") or "?"
    match = re.search(r"\b(\d+) ?x ?v\d", cells.text("notes").lower())
    slices = int(match[1]) if match and total % int(match[1]) == 0 else 1
    peak, memory = cells.number("peak_bf16_tflops"), cells.number("hbm_gb")
    try:
        node = node_of(name)
    except ConfigError:
        if not peak:
            raise
        cells.assumed["hardware"] = f"{name!r} is not known: curves of an A100, peak and memory of the row"
        return unknown_kind(name, total, peak * 1e12, (memory or 80) * 1e9)
    return cluster_of_kind(name, total, node=node, slices=slices)


def _candidates(
    cells: _Cells, model: ModelShape, degrees: Mapping[str, int], cluster: Cluster
) -> Iterator[tuple[Plan, int]]:
    ways = degrees["dp"] * degrees["sharding"] * degrees["ep"]
    per_chunk = model.layers // degrees["pp"]
    virtual = cells.number("vpp")
    if virtual is None and degrees["pp"] > 1:
        chunks = [v for v in range(1, min(per_chunk, 8) + 1) if per_chunk % v == 0]
    else:
        chunks = [virtual or 1]
    recompute = _recompute(cells)
    kinds = [recompute] if recompute else ["none", "core_attn", "full_attn", "full"]
    is_whole = cells.text("sp").lower().startswith(("yes", "1", "true"))
    for batch, rows in _batches(cells, ways, degrees["pp"], cluster):
        for chunk, kind in itertools.product(chunks, kinds):
            many = batch // (ways * rows)
            yield (
                Plan.from_degrees(
                    dp=degrees["dp"],
                    pp=degrees["pp"],
                    sharding=degrees["sharding"],
                    sep=degrees["sep"],
                    mp=degrees["mp"],
                    ep=degrees["ep"],
                    sharding_stage=degrees["stage"] or 1,
                    sequence_parallel=is_whole and degrees["mp"] > 1,
                    schedule=None if degrees["pp"] == 1 else "VPP" if chunk > 1 else "1F1B",
                    virtual_stages=chunk,
                    num_microbatches=many,
                    recompute=kind,
                    order=_ORDER,
                ),
                batch,
            )


def _batches(cells: _Cells, ways: int, stages: int, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """(batch, samples of a microbatch on one data-parallel rank) to consider."""
    batch, rows = cells.number("gbs"), cells.number("mbs")
    powers = [1, 2, 4, 8, 16, 32, 64]
    if batch and rows and rows * cluster.num_devices == batch and rows * ways < batch and stages == 1:
        rows = batch // ways  # told for each device, as MaxText does
    if batch and rows and (batch % (rows * ways) != 0):
        cells.assumed["mbs"] = f"{rows} does not divide gbs"
        rows = None
    if batch:
        for each in [rows] if rows else powers:
            if batch % (each * ways) == 0:
                yield batch, each
        return
    for each in [rows] if rows else powers:
        yield each * ways * (4 * stages if stages > 1 else 1), each
