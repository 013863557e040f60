"""`polyreme plan`: the best parallel plans for a configuration on devices that need not be there."""

import functools
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from polyreme.cli.output_file import check_writable, write
from polyreme.errors import ConfigError
from polyreme.planner.published_file import answer, read_rows

_VERIFIED = 3  # plans that --verify compiles, and more until one is not refuted
_WIDTH = 150  # of tables that do not go to a terminal


def plan(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="YAML configuration of a run, pretraining or fine-tuning.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file's, dotted.")
    ] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="Plan for so many devices of this machine.")] = None,
    topology: Annotated[
        str | None, typer.Option(metavar="KIND:SHAPE", help="Plan for known devices: v5e:16x16, h100:8x8, a100:1024.")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(metavar="FILE", help="Plan for a cluster described in YAML.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Rows of a step (sets train.global_batch).")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many plans to show.")] = 10,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FEATURE",
            help="Not to be used: recompute, offload, sharding, pp, mp, sep, ep, sequence_parallel, virtual_stages; "
            "may be repeated.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the chosen plan as a configuration for pretrain.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compile the best plans, choose none refuted.")] = False,
    explain: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw memory and timeline of the chosen plan: .png, .svg, .pdf.")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option("--predict", metavar="FILE", help="Rows of runs to predict: CSV, YAML or JSON.")
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            metavar="KIND,...", help="Deal the file's plan out by speed over stages of these kinds: h100,a100,a100."
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="With --predict: fail if anything that a row says is not followed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Find the fastest parallel plans that fit, and say what binds them, what would not fit and why.

    Nothing of the devices need be there. With --predict: the step time, MFU and memory of runs, one a row of a file.
    With --stages: the blocks that each stage of the file's own pipeline gets, where stages lie on several kinds.

    Example: polyreme plan configs/gpt3_175b.yaml --topology a100:128x8 --output plan.yaml
    """
    if rows is not None:
        where = {"CONFIG": config, "--devices": devices, "--topology": topology, "--cluster": cluster}
        asked = {"--global-batch": global_batch, "--without": without, "--output": output, "--explain": explain}
        for name, value in (where | asked | {"--verify": verify or None}).items():
            if value is not None:
                raise ConfigError(f"--predict {rows} with {name}: the rows say what is run where; leave {name} out")
        _predict(rows, as_json, strict)
        return
    if strict:
        raise ConfigError("--strict is for --predict; a configuration or cluster file with an unknown word is refused")
    if config is None:
        raise ConfigError("polyreme plan needs a CONFIG, such as configs/gpt_kjv.yaml, or --predict FILE")
    from polyreme.recipes.planning import drawing

    if explain is not None:
        drawing.check_picture(explain)
    if output is not None:
        _check_output(output, config, explain)
    if stages is not None:
        unread = {"--devices": devices, "--topology": topology, "--cluster": cluster, "--without": without}
        for name, value in (unread | {"--verify": verify or None}).items():
            if value is not None:
                raise ConfigError(f"--stages {stages} with {name}: the file's own plan is dealt out; leave {name} out")
        batch = [] if global_batch is None else [f"train.global_batch={global_batch}"]
        _deal_out(config, [*(overrides or []), *batch], stages.split(","), output, explain, as_json)
        return
    where = _cluster(devices, topology, cluster)
    _plan(config, overrides or [], where, global_batch, top, without or [], output, verify, explain, topology, as_json)


def _plan(
    path: Path,
    overrides: Sequence[str],
    where: Any,
    global_batch: int | None,
    top: int,
    without: Sequence[str],
    output: Path | None,
    verify: bool,
    explain: Path | None,
    topology: str | None,
    as_json: bool,
) -> None:
    from polyreme.recipes import config_file
    from polyreme.recipes.planning import plan as recipe
    from polyreme.recipes.planning import report as plan_report

    twice = [each for each in overrides if each.startswith("train.global_batch=")]
    if global_batch is not None and twice:
        raise ConfigError(f"--global-batch {global_batch} with {twice[0]}: both set the rows of a step; leave one out")
    batch = [] if global_batch is None else [f"train.global_batch={global_batch}"]
    loaded = config_file.load(path, [*overrides, *batch])
    tell = functools.partial(typer.echo, err=True)
    answer = recipe.answer(loaded.config, where, top=top, without=without, report=tell)
    if verify and answer.search.plans:
        answer = replace(answer, verified=_verify(answer, where, topology, is_quiet=as_json))
    if as_json:
        typer.echo(json.dumps(plan_report.to_json(answer), indent=1))
    else:
        _console().print(plan_report.report(answer))
    chosen = answer.chosen
    if chosen is None:
        if explain is not None and answer.search.too_big:
            _draw(answer, plan_report.too_big(answer)[0], explain, as_json)
        raise ConfigError(_nothing(answer))
    if explain is not None:
        _draw(answer, answer.search.plans[chosen], explain, as_json)
    if output is not None:
        write(output, recipe.run_file(loaded, answer, output))
        _say(f"\nwritten: {output}; run it with: polyreme {_command(loaded.config)} {output}", as_json)
    elif not as_json:
        typer.echo(
            f"\n--output FILE writes the plan marked * as a configuration for polyreme {_command(loaded.config)}"
        )


def _command(config: Any) -> str:
    """What runs a configuration: that of fine-tuning names weights."""
    return "finetune" if isinstance(config.model, str) else "pretrain"


def _deal_out(
    path: Path, settings: Sequence[str], kinds: Sequence[str], output: Path | None, explain: Path | None, as_json: bool
) -> None:
    """The file's plan over stages of several kinds."""
    from polyreme.recipes import config_file
    from polyreme.recipes.config import PretrainConfig
    from polyreme.recipes.planning import drawing, mixed
    from polyreme.recipes.planning.plan import plan_words

    answer = mixed.answer(config_file.load(path, settings, PretrainConfig).config, kinds)
    best = answer.best
    if as_json:
        typer.echo(json.dumps(mixed.to_json(answer), indent=1))
    else:
        _console().print(*mixed.report(answer), sep="\n")
    if explain is not None:
        title = f"{plan_words(best.plan)}  on {', '.join(kinds)}"
        drawing.draw(explain, title, best.plan, best, best.durations)
        _say(f"\ndrawn: {explain}", as_json)
    mixed.check_fits(answer)
    if output is not None:
        write(output, mixed.run_file(answer, path.name))
        _say(f"\nwritten: {output}; run it with: polyreme pretrain {output}", as_json)


def _console() -> Console:
    console = Console(file=sys.stdout, highlight=False)
    return console if console.is_terminal else Console(file=sys.stdout, highlight=False, width=_WIDTH)


def _cluster(devices: int | None, topology: str | None, cluster: Path | None) -> Any:
    from polyreme.planner import cluster_file

    given = {"--devices": devices, "--topology": topology, "--cluster": cluster}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        got = " and ".join(named) or "none of them"
        raise ConfigError(f"say what to plan for: --devices N, --topology v5e:16x16 or --cluster FILE; got {got}")
    if devices is not None:
        return cluster_file.of_devices(devices)
    return cluster_file.of_topology(topology) if topology is not None else cluster_file.read(str(cluster))


def _verify(answer: Any, where: Any, topology: str | None, *, is_quiet: bool) -> tuple[Any, ...]:
    """Compile plans in their order: some, and as many as it takes to find one that is not refuted."""
    from polyreme.recipes.planning import verify as plan_verify
    from polyreme.recipes.planning.plan import plan_words

    is_tpu = bool(where.links) and bool(where.links[0].torus)
    verified: list[Any] = []
    for at, ranked in enumerate(answer.search.plans):
        if at >= _VERIFIED and replace(answer, verified=tuple(verified)).chosen in range(at):
            break
        if not is_quiet:
            typer.echo(f"compiling plan {at + 1}: {plan_words(ranked.plan)}", err=True)
        slices = topology if topology is not None and is_tpu and importlib.util.find_spec("libtpu") else ""
        verified.append(plan_verify.verify_apart(answer.config, ranked.plan, topology=slices))
    return tuple(verified)


def _draw(answer: Any, ranked: Any, path: Path, as_json: bool) -> None:
    from polyreme.planner.predict import chunk_durations
    from polyreme.recipes.planning import drawing
    from polyreme.recipes.planning.plan import graph_of_run, plan_words

    graph, batch = graph_of_run(answer.config, answer.training.attention)
    durations = chunk_durations(graph, ranked.plan, answer.cluster, batch, answer.training)
    title = f"{plan_words(ranked.plan)}  on {answer.cluster.num_devices} x {answer.cluster.device.name}"
    is_serial = answer.cluster.shared > 1
    drawing.draw(path, title, ranked.plan, ranked.prediction, durations, is_serial=is_serial)
    _say(f"\ndrawn: {path}", as_json)


def _nothing(answer: Any) -> str:
    what = f"no plan fits {answer.cluster.num_devices} x {answer.cluster.device.name}"
    if answer.verified:
        return f"{what}: the compiler refuted all {len(answer.verified)}; ask for more with --top, or for more devices"
    if answer.changes:
        return f"{what}; the cheapest change: {answer.changes[0].what}"
    if not answer.search.too_big:
        near = " and ".join(f"{count:,}" for count in answer.nearest if count) or "no near number"
        return f"{what}: none divides the model and the batch; {near} devices do, another --global-batch may too"
    return f"{what}, nor many more of them; the model needs a kind with more memory"


def _check_output(path: Path, config: Path, explain: Path | None) -> None:
    check_writable(path)
    if path.exists() and config.exists() and path.samefile(config):
        raise ConfigError(f"--output {path}: is the configuration itself; give another name")
    if explain is not None and path.resolve() == explain.resolve():
        raise ConfigError(f"--output {path}: is the picture of --explain; give another name")


def _say(text: str, as_json: bool) -> None:
    """A line for a person: beside JSON it goes to standard error."""
    typer.echo(text, err=as_json)


def _predict(path: Path, as_json: bool, strict: bool) -> None:
    answers = [answer(row) for row in read_rows(path)]
    for column in dict.fromkeys(column for each in answers for column in each["not_read"]):
        typer.echo(f"{path}: not read: column {column}", err=True)
    typer.echo(json.dumps(answers, indent=2) if as_json else "\n".join(map(_line, answers)))
    lost = [f"{each.get('id', '')} {line}" for each in answers for line in each.get("not_understood", ())]
    for line in lost:
        typer.echo(f"{path}: not followed: {line}", err=True)
    failed = [each for each in answers if "error" in each]
    if failed:
        raise ConfigError(f"{len(failed)} of {len(answers)} rows describe no run; the first: {failed[0]['error']}")
    lost += [f"column {column}" for each in answers for column in each["not_read"]]
    if strict and lost:
        raise ConfigError(f"--strict: {len(lost)} things that the rows say are not followed; the first: {lost[0]}")


def _line(row: dict[str, Any]) -> str:
    name = f"{row.get('id', '')!s:8} {str(row.get('model', ''))[:24]:24}"
    if "error" in row:
        return f"{name} {row['error']}"
    total = f"{row['memory']['total'] / 2**30:6.1f} GiB{'' if row['fits'] else ', more than there is'}"
    tokens = f"{row['tokens_per_second_per_device']:9.0f} tokens/s a device"
    assumed = f"; assumed: {', '.join(row['assumed'])}" if row["assumed"] else ""
    low, high = row["interval"]
    seconds = f"{row['step_seconds']:10.3f} s ({low:.3g} to {high:.3g})"
    return f"{name} {seconds}  {tokens}  MFU {row['mfu']:.1%}  {total}  {row['binds']}{assumed}"
