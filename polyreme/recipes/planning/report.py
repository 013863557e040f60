"""The report of `polyreme plan`: tables of the best plans, of their memory, and of what was ruled out and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from polyreme.planner.cluster import Cluster
from polyreme.planner.interval import reasons
from polyreme.planner.prediction import Memory, Prediction
from polyreme.planner.search import TIE, Ranked, shortfall
from polyreme.recipes.config import RunConfig
from polyreme.recipes.estimate import num_parameters
from polyreme.recipes.finetune_config import FinetuneConfig
from polyreme.recipes.planning.plan import Answer, graph_of_run, plan_words
from polyreme.units import bytes_text, seconds_text

PARTS = ("parameters", "gradients", "optimizer", "activations", "workspace")
_SHOWN = 5  # rows of plans that do not fit, and of reasons


def report(answer: Answer) -> RenderableType:
    """Everything, for a terminal."""
    return Group(*_parts(answer))


def to_json(answer: Answer) -> dict[str, Any]:
    """Everything, as plain values."""
    result, chosen = answer.search, answer.chosen
    return {
        "cluster": _cluster_values(answer.cluster),
        "model": {"family": answer.config.dimensions.family, "parameters": _num_parameters(answer)},
        "global_batch": graph_of_run(answer.config)[1],
        "training": asdict(answer.training),
        "looked_at": result.looked_at,
        "chosen": chosen,
        "plans": [
            _values(ranked)
            | {"less_sure_by": list(_less_sure(answer, ranked))}
            | ({"verified": _verify_values(answer, at)} if at < len(answer.verified) else {})
            for at, ranked in enumerate(result.plans)
        ],
        "own": None if answer.own_plan is None else _values(answer.own_plan),
        "would_not_fit": [_values(each) | _short_values(each.prediction) for each in too_big(answer)],
        "ruled_out": [{"why": why, "meshes": count} for why, count in result.refused.items()],
        "nearest_device_counts": list(answer.nearest),
        "changes": [{"what": c.what, "devices": c.devices, **_values(c.best)} for c in answer.changes],
    }


def too_big(answer: Answer) -> Sequence[Ranked]:
    """Plans that do not fit and would be faster than the best that does, near misses first; if none fits, of all."""
    found = answer.search
    if not found.plans:
        return found.too_big
    best = found.plans[0].prediction.step_seconds
    return [each for each in found.too_big if each.prediction.step_seconds < best]


def _parts(answer: Answer) -> Iterator[RenderableType]:
    yield Text(_heading(answer), style="bold")
    result = answer.search
    if result.plans:
        yield _best(answer)
        chosen = answer.chosen
        if chosen is not None:
            yield from _details(answer, result.plans[chosen])
        if answer.verified:
            yield _verify(answer)
    else:
        why = f"No plan fits the {bytes_text(_capacity(answer))} that a device can use."
        yield Text(f"\n{why if result.too_big else 'No mesh divides the model and the batch.'}", style="bold red")
    yield from _ruled_out(answer)
    if answer.changes:
        yield _changes(answer)


def _heading(answer: Answer) -> str:
    cluster, config = answer.cluster, answer.config
    model = config.dimensions
    count = f"{cluster.num_devices} x {cluster.device.name}"
    shared = ", which share one machine's cores" if cluster.shared > 1 else _joined(cluster)
    return (
        f"{model.family} of {_num_parameters(answer):,} parameters, {model.seq_len:,} tokens a row, "
        f"{graph_of_run(config)[1]:,} rows a step, {answer.training.dtype}{_tuning(config)}, on {count}{shared}\n"
        f"{answer.search.looked_at:,} plans predicted; figures of the devices: "
        f"{cluster.device.source or 'cluster file'}{_half_precision(answer)}"
    )


def _joined(cluster: Cluster) -> str:
    """How many devices the near link joins, where it does not join all."""
    if len(cluster.links) < 2 or cluster.links[0].devices >= cluster.num_devices:
        return ""
    near = cluster.links[0]
    return f", joined by {near.name} in groups of {near.devices}"


def _tuning(config: RunConfig) -> str:
    """What of a model is fine-tuned; nothing for pretraining."""
    if not isinstance(config, FinetuneConfig):
        return ""
    codes = f" beside {config.weight_dtype}" if config.weight_dtype else ""
    kinds = {
        "full": "all of it",
        "freeze": f"its last {config.freeze_trainable_layers} blocks",
        "lora": f"LoRA of rank {config.lora_rank}{codes}",
    }
    return f", {config.stage} of {kinds[config.fine_tuning]}"


def _half_precision(answer: Answer) -> str:
    """A line for a run in float32 on devices that compute 16 bits sooner; nothing for others."""
    device = answer.cluster.device
    if answer.training.dtype != "float32" or not {"float32", "bfloat16"} <= device.flops.keys():
        return ""
    times = device.flops["bfloat16"] / device.flops["float32"]
    if times < 1.5:
        return ""
    return (
        f"\ntrain.amp_level is O0, products in float32: {device.name} multiplies bfloat16 {times:.2g} times as fast; "
        "plan with train.amp_level=O1 (or O2) to have that"
    )


def _best(answer: Answer) -> Table:
    title = (
        f"\nBest plans, in the {bytes_text(_capacity(answer))} that a device can use (of those within {TIE:.0%} the "
        "simpler first)"
    )
    table = _table(title, "#", "plan")
    for name in ("step", "tokens/s", "MFU", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what binds")
    for at, each in enumerate(answer.search.plans):
        mark = "*" if at == answer.chosen else "refuted" if answer.is_refuted(at) else ""
        table.add_row(f"{at + 1}{mark}", plan_words(each.plan), *_figures(each.prediction), _binds(each.prediction))
    if answer.own_plan is not None:
        own = answer.own_plan.prediction
        words = plan_words(answer.own_plan.plan) + ("" if own.fits else " (does not fit)")
        table.add_row("file's", words, *_figures(own), _binds(own), style="dim")
    return table


def _details(answer: Answer, chosen: Ranked) -> Iterator[RenderableType]:
    prediction = chosen.prediction
    table = _table("\nMemory of a device of the plan marked *, GiB, by what holds it", "stage")
    for name in (*PARTS, "total"):
        table.add_column(name, justify="right")
    for name, memory in _stages(prediction):
        table.add_row(name, *[_gib(getattr(memory, part)) for part in (*PARTS, "total")])
    yield table
    yield Text(f"\nWhat binds: {prediction.binds}")
    times = prediction.times
    parts = {
        "arithmetic": times.compute,
        "recompute": times.recompute,
        **{f"communication over {axis}": seconds for axis, seconds in times.exposed.items()},
        "waiting in the pipeline": times.bubble,
        "update": times.optimizer,
        "host memory": times.offload,
        "waiting for the slowest device": times.slowest,
    }
    text = ", ".join(f"{name} {seconds_text(value)}" for name, value in parts.items() if value > 0)
    yield Text(f"\nWhere the step goes: {text}")
    low, high = (seconds_text(each) for each in prediction.interval)
    why = ", ".join(_less_sure(answer, chosen))
    yield Text(
        f"\nNine of ten runs like this take {low} to {high} a step{why and f' (less sure than others by: {why})'}"
    )


def _stages(prediction: Prediction) -> Iterable[tuple[str, Memory]]:
    """The fullest stage first, then the first and last of a pipeline."""
    stages = prediction.stages
    if len(stages) == 1:
        return [("every device", stages[0])]
    fullest = max(range(len(stages)), key=lambda stage: stages[stage].total)
    shown = dict.fromkeys((fullest, 0, len(stages) - 1))
    return [(f"{stage}{' (fullest)' if stage == fullest else ''}", stages[stage]) for stage in shown]


def _verify(answer: Answer) -> Table:
    table = _table("\nCompiled", "#", "plan")
    for name in ("GiB predicted", "GiB compiled", "of"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("collectives of the fullest device, bytes sent a step")
    for index, (ranked, verified) in enumerate(zip(answer.search.plans, answer.verified, strict=False)):
        prediction = ranked.prediction
        verdict = "refuted: does not fit" if answer.is_refuted(index) else "fits"
        sizes = [_gib(nbytes) for nbytes in (prediction.memory.total, verified.total, prediction.capacity)]
        stage = max(verified.stages, key=lambda each: each.total)
        sent = [f"{e.count} {e.kind} over {_axes(e.axes)}: {bytes_text(e.wire_bytes)}" for e in stage.exchanges]
        table.add_row(str(index + 1), plan_words(ranked.plan), *sizes, verdict, ", ".join(sent) or "none")
    return table


def _ruled_out(answer: Answer) -> Iterator[RenderableType]:
    large = too_big(answer)[:_SHOWN]
    if large:
        why = "faster, but would not fit" if answer.search.plans else "what lacks least"
        table = _table(f"\nOut of memory: {why}", "plan")
        for name in ("step", "GiB", "too much"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("most of it")
        for ranked in large:
            lack, part = shortfall(ranked.prediction)
            held = getattr(ranked.prediction.memory, part)
            sizes = [_gib(ranked.prediction.memory.total), _gib(lack)]
            words = f"{part}, {_gib(held)} GiB"
            table.add_row(plan_words(ranked.plan), seconds_text(ranked.prediction.step_seconds), *sizes, words)
        yield table
    reasons = sorted(answer.search.refused.items(), key=lambda item: -item[1])
    if reasons:
        lines = [f"  {count:4} {'mesh' if count == 1 else 'meshes'}: {why}" for why, count in reasons[:_SHOWN]]
        others = len(reasons) - _SHOWN
        more = [f"  and {others} other reason{'s' * (others > 1)} (--json lists all)"] if others > 0 else []
        yield Text("\n".join(["", "No plans:", *lines, *more]))


def _changes(answer: Answer) -> Table:
    table = _table("\nThe cheapest changes after which a plan fits: settings, then devices", "change", "the plan then")
    for name in ("devices", "step", "tokens/s", "MFU", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in answer.changes:
        figures = _figures(each.best.prediction)
        table.add_row(each.what, plan_words(each.best.plan), f"{each.devices:,}", *figures)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name)
    return table


def _figures(prediction: Prediction) -> tuple[str, ...]:
    return (
        seconds_text(prediction.step_seconds),
        f"{prediction.tokens_per_second:,.0f}",
        f"{prediction.mfu:.1%}",
        _gib(prediction.memory.total),
    )


def _binds(prediction: Prediction) -> str:
    """The largest part of a step alone."""
    return prediction.binds.split(", then ")[0].replace(" of the step", "")


def _gib(nbytes: float) -> str:
    size = nbytes / 2**30
    return f"{size:.3g}" if size < 1 else f"{size:.2f}" if size < 100 else f"{size:,.0f}"


def _axes(axes: Sequence[str] | None) -> str:
    return "?" if axes is None else "+".join(axes) or "nothing"


def _capacity(answer: Answer) -> float:
    return answer.cluster.device.memory * answer.cluster.device.usable


def _num_parameters(answer: Answer) -> int:
    return num_parameters(answer.config.dimensions)


def _less_sure(answer: Answer, ranked: Ranked) -> tuple[str, ...]:
    graph, _ = graph_of_run(answer.config, answer.training.attention)
    return reasons(graph, ranked.plan, answer.cluster, answer.training)


def _values(ranked: Ranked) -> dict[str, Any]:
    prediction = ranked.prediction
    memory = asdict(prediction.memory) | {"total": prediction.memory.total}
    return {
        "words": plan_words(ranked.plan),
        "plan": ranked.plan.to_dict(),
        "step_seconds": prediction.step_seconds,
        "interval": list(prediction.interval),
        "tokens_per_second": prediction.tokens_per_second,
        "mfu": prediction.mfu,
        "fits": prediction.fits,
        "capacity": prediction.capacity,
        "memory": memory,
        "stages": [asdict(stage) | {"total": stage.total} for stage in prediction.stages],
        "times": asdict(prediction.times) | {"total": prediction.times.total},
        "binds": prediction.binds,
    }


def _short_values(prediction: Prediction) -> dict[str, Any]:
    lack, part = shortfall(prediction)
    return {"too_much": lack, "most_of_it": part}


def _verify_values(answer: Answer, at: int) -> dict[str, Any]:
    return answer.verified[at].to_dict() | {"total": answer.verified[at].total, "refuted": answer.is_refuted(at)}


def _cluster_values(cluster: Cluster) -> dict[str, Any]:
    return {
        "device": cluster.device.name,
        "num_devices": cluster.num_devices,
        "shared": cluster.shared,
        "memory": cluster.device.memory,
        "source": cluster.device.source,
        "links": [asdict(link) for link in cluster.links],
    }
