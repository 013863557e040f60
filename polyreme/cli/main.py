"""The `polyreme` command. Anything that needs jax is imported once the command is known, so that --help is instant."""

import importlib.metadata
import inspect
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from polyreme import flags
from polyreme.cli import launch as launcher
from polyreme.cli import run as runner
from polyreme.cli.bench import bench_app
from polyreme.cli.calibrate import calibrate
from polyreme.cli.comm import comm
from polyreme.cli.compress import prune, quantize
from polyreme.cli.dash import dash
from polyreme.cli.data import ConfigPath, Overrides, data_app
from polyreme.cli.deploy import export, infer
from polyreme.cli.device import device_app
from polyreme.cli.evaluate import evaluate
from polyreme.cli.examples import examples
from polyreme.cli.explain import explain
from polyreme.cli.failure import describe, exit_code, report
from polyreme.cli.generate import generate
from polyreme.cli.models import convert, models_app
from polyreme.cli.plan import plan
from polyreme.cli.profile import profile
from polyreme.cli.prove import prove
from polyreme.cli.schedule import schedule
from polyreme.cli.serve import serve
from polyreme.cli.transcribe import transcribe
from polyreme.cli.tuned import chat, merge
from polyreme.errors import EXIT_INTERNAL, ConfigError, DeviceMemoryError, did_you_mean, is_out_of_memory

app = typer.Typer(
    name="polyreme",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train and run large models: imperative code, whole-step programs, any parallel plan.",
)

Resume = Annotated[
    str, typer.Option(metavar="auto|never|STEP", help="Go on from the newest checkpoint, none, or that of a step.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print settings and costs; train nothing.")]
Output = Annotated[str | None, typer.Option(help="Folder for checkpoints and logs (sets output).")]
Device = Annotated[str | None, typer.Option(help="cpu, gpu, tpu or a plug-in's name (sets device).")]


def _command() -> str:
    """How this program was called, for the line that says how to resume."""
    return sys.argv[0] if Path(sys.argv[0]).name == "polyreme" else "polyreme"


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"polyreme {_version()}")
        raise typer.Exit


def _print_settings(is_wanted: bool) -> None:
    if is_wanted:
        from polyreme.cli import settings

        typer.echo(settings.describe())
        raise typer.Exit


def _print_finetune_settings(is_wanted: bool) -> None:
    if is_wanted:
        from polyreme.cli import settings

        typer.echo(settings.describe_finetune())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")] = False,
) -> None:
    """Options before any command; --debug is taken out by main, which needs it for errors in the options themselves."""


def pretrain(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Resume = "auto",
    dry_run: DryRun = False,
    output: Output = None,
    device: Device = None,
    settings: Annotated[
        bool,
        typer.Option(
            "--settings",
            help="List all settings with what they mean, and exit.",
            callback=_print_settings,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Train a model from scratch, or go on with a run that stopped.

    Example: polyreme pretrain configs/gpt_kjv.yaml train.steps=100 train.learning_rate=1e-4
    """
    _train("pretrain", config, overrides or [], resume, dry_run, {"output": output, "device": device})


def finetune(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Resume = "auto",
    dry_run: DryRun = False,
    output: Output = None,
    device: Device = None,
    settings: Annotated[
        bool,
        typer.Option(
            "--settings",
            help="List all settings with what they mean, and exit.",
            callback=_print_finetune_settings,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Go on training published weights, or those of a run, on conversations; all of them or adapters.

    Example: polyreme finetune configs/smollm2_lora.yaml train.steps=100 lora_rank=16
    """
    _train("finetune", config, overrides or [], resume, dry_run, {"output": output, "device": device})


def _train(
    command: str, path: Path, overrides: Sequence[str], resume: str, dry_run: bool, named: dict[str, str | None]
) -> None:
    from polyreme.cli import dry_run as dry
    from polyreme.recipes import config_file

    _check_resume(resume)
    options = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in named.items() if value is not None]
    words = [*overrides, *options]
    _prepare_devices(*config_file.devices(path, words))
    kinds = {"pretrain": config_file.PretrainConfig, "finetune": config_file.FinetuneConfig}
    loaded = config_file.load(path, words, kinds[command])
    if dry_run:
        _check_platform(loaded.config)
        typer.echo(dry.describe(loaded))
        return
    from polyreme.recipes.training import run as recipe

    source: dict[str, Any] = {
        "path": loaded.path,
        "folder": loaded.folder,
        "overrides": loaded.overrides,
        "origin": loaded.origin,
        "resume_command": [_command(), command, str(loaded.path), *loaded.overrides, "--resume", "auto"],
    }
    config = loaded.config
    if config.plan.elastic:
        from polyreme.recipes.planning import elastic

        config = elastic.fitted(config, typer.echo)
    try:
        recipe.run(config, resume=resume, overrides_source=source)
    except Exception as error:
        if not (isinstance(error, MemoryError) or is_out_of_memory(error)):
            raise
        from polyreme.recipes.planning.memory_advice import advice

        facts = error if isinstance(error, DeviceMemoryError) else DeviceMemoryError(describe(error))
        planned = advice(loaded) or str(error).removeprefix(facts.facts).removeprefix(". ")
        raise DeviceMemoryError(facts.facts, facts.asked, facts.parts, planned) from error


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for the devices.")] = 60.0,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Measure the links and ranks of a launched job instead.")
    ] = False,
    sheet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --cluster: YAML of the cluster, what it should reach.")
    ] = None,
    least: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="With --cluster: share of those rates that is enough.")
    ] = 0.5,
) -> None:
    """Check this machine and say how to mend what is wrong; exits 1 if something is.

    Of a cluster: polyreme launch --on slurm --nnodes 4 doctor --cluster --sheet cluster.yaml
    """
    if sheet is not None and not cluster:
        raise ConfigError(f"--sheet {sheet}: is what links are held against; add --cluster")
    if cluster:
        _examine_cluster(sheet, least, as_json)
        return
    from polyreme.recipes import doctor as recipe

    checks = recipe.examine(timeout)
    typer.echo(recipe.as_json(checks) if as_json else recipe.as_text(checks))
    if any(check.is_failure for check in checks):
        raise typer.Exit(1)


def _examine_cluster(sheet: Path | None, least: float, as_json: bool) -> None:
    from polyreme.planner import cluster_file
    from polyreme.recipes.planning import links

    report = links.examine(None if sheet is None else cluster_file.read(sheet), least)
    if flags.trainer_id() == 0:
        typer.echo(links.as_json(report) if as_json else links.as_text(report))
    if not report.is_well:
        raise typer.Exit(1)


# the order and the headings of --help
_PANELS: dict[str, tuple[Any, ...]] = {
    "Begin": (doctor, examples, explain, device_app),
    "Train": (pretrain, finetune, runner, launcher, dash, profile),
    "Before hardware is rented": (plan, prove, comm, schedule, calibrate),
    "Models and data": (data_app, models_app, merge, convert, quantize, prune, evaluate),
    "Use a model": (generate, chat, transcribe, serve, export, infer, bench_app),
}


def _register() -> None:
    for panel, entries in _PANELS.items():
        for entry in entries:
            if isinstance(entry, typer.Typer):
                app.add_typer(entry, rich_help_panel=panel)
            elif entry in (runner, launcher):
                entry.register(app, panel)
            else:
                app.command("eval" if entry is evaluate else None, rich_help_panel=panel)(entry)
    below = [entry for entries in _PANELS.values() for entry in entries if isinstance(entry, typer.Typer)]
    for of_commands in (app, *below):
        for command in of_commands.registered_commands:
            command.help = _flowing(command.help or inspect.getdoc(command.callback) or "")


def _flowing(text: str) -> str:
    """A docstring whose paragraphs are one line each, which fits any terminal: the help keeps line ends."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\n|\n(?=Example: )", text))


_register()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Never raises, never shows a traceback without --debug.

    In one of several processes it ends the process itself if something failed, so that the watchdog learns of it, and
    an internal error is raised: the watchdog shows where it happened, once, and ends the other processes.
    """
    code = _run(arguments)
    if code and _is_one_of_several():
        sys.exit(code)  # looked up late: whoever called sys.exit(main()) holds the one that the watchdog has replaced
    return code


def _is_one_of_several() -> bool:
    return os.environ.get("PADDLE_TRAINERS_NUM", "1") != "1"


def _run(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["launch"]:  # --debug may be the script's
        return launcher.run(words[1:])
    if words[:1] == ["run"]:
        return runner.run(words[1:])
    options = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in options
    words = [word for word in options if word != "--debug"] + words[len(options) :]
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character gets its escape, not a crash
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        debug = debug or flags.debug()
        code = app(args=words, prog_name="polyreme", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        _let_go_of_output()
        return 0
    except SystemExit as ending:
        return _code_of(ending)
    except BaseException as error:  # the last resort, where every error becomes an exit code
        if type(error).__name__ == "NoArgsIsHelpError":
            return 2  # the help has been printed
        if _is_one_of_several() and exit_code(error) == EXIT_INTERNAL:
            raise
        code = report(error, debug)
        if isinstance(error, OSError):
            _let_go_of_output()
        return code


def _open_closed_streams() -> None:
    """A stream that was closed (`>&-`) is None: what is written there is written to nothing."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  (for as long as the process)


def _let_go_of_output() -> None:
    """The last flush of an output that cannot be written would fail as well."""
    try:
        sys.stdout.flush()
    except OSError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def _code_of(ending: SystemExit) -> int:
    if isinstance(ending.__context__, BrokenPipeError):
        return 0  # rich ends the process when the reader of its help text is gone
    if ending.code is None or isinstance(ending.code, int):
        return ending.code or 0
    typer.echo(f"error: {ending.code}", err=True)
    return 1


def _check_resume(resume: str) -> None:
    if resume not in ("auto", "never") and not resume.isdecimal():
        near = did_you_mean(resume, ["auto", "never"])
        hint = near if "mean" in near else ""
        raise ConfigError(f"--resume {resume}: needs auto, never or the number of a step{hint}")


def _check_platform(config: Any) -> None:
    """What a run would refuse once it knows its devices; jax is asked for them where the answer matters alone."""
    if config.plan.expert_dispatch == "ragged":
        from polyreme.kernels import select

        config.check_platform(config.device or select.backend())


def _prepare_devices(device: str | None, count: int) -> None:
    """Tell jax, before it is imported, to leave accelerators alone and to make this process's share of the CPU devices
    the plan needs."""
    if device != "cpu":
        return
    platforms = os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if "cpu" not in platforms.split(","):
        raise ConfigError(f"device=cpu, but JAX_PLATFORMS={platforms} in the environment leaves the CPU out; unset it")
    here = count // flags.trainers_num()
    if flags.cpu_num() is None and here > 1:
        os.environ["CPU_NUM"] = str(here)


def _version() -> str:
    try:
        return importlib.metadata.version("polyreme")
    except importlib.metadata.PackageNotFoundError:
        return "(run from source, not installed)"


if __name__ == "__main__":
    sys.exit(main())
