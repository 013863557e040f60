"""The launcher's flags: one table, from which parsing, environment twins, help and errors follow."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from polyreme import flags
from polyreme.distributed.job.rendezvous import Address
from polyreme.distributed.launch.schedulers import SCHEDULERS, NodePlace, Scheduler, Submission
from polyreme.distributed.launch.schedulers.base import check_settings, read_settings
from polyreme.errors import ConfigError, did_you_mean

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class LauncherFlag(NamedTuple):
    """One flag: the environment variable that stands for it, its default as text, what it means."""

    name: str
    env: str
    default: str
    meaning: str
    is_switch: bool = False


FLAGS = (
    LauncherFlag(
        "on",
        "POLYREME_SCHEDULER",
        "auto",
        f"who starts a launcher on each node: local (you do), {', '.join(SCHEDULERS)}; auto: the one whose job this is",
    ),
    LauncherFlag("job_options", "POLYREME_JOB_OPTIONS", "", 'settings of --on, "time=1:00:00 gres=gpu:8" of sbatch\'s'),
    LauncherFlag("dry_run", "", "", "print what --on would submit, and submit nothing", is_switch=True),
    LauncherFlag("wait", "", "", "with --on slurm: until the job has ended, whose exit code it is", is_switch=True),
    LauncherFlag(
        "master", "PADDLE_MASTER", "", "host:port where the launchers of several nodes meet; node 0 listens there"
    ),
    LauncherFlag("rank", "PADDLE_RANK", "-1", "this node's number, from 0; -1 takes the next free one"),
    LauncherFlag("nnodes", "PADDLE_NNODES", "1", 'nodes of the job; "2:4" for 2 to 4, as many as come in time'),
    LauncherFlag(
        "nproc_per_node", "PADDLE_NPROC_PER_NODE", "", "processes on this node; one for each of --devices, else 1"
    ),
    LauncherFlag(
        "devices", "PADDLE_DEVICES", "", "indexes of the accelerators to use, 0,1,..., shared out over the processes"
    ),
    LauncherFlag("log_dir", "PADDLE_LOG_DIR", "log", "folder of workerlog.N, one file a rank"),
    LauncherFlag("log_level", "PADDLE_LOG_LEVEL", "INFO", f"what the launcher itself says: {', '.join(LOG_LEVELS)}"),
    LauncherFlag("log_overwrite", "PADDLE_LOG_OVERWRITE", "", "begin logs anew instead of appending", is_switch=True),
    LauncherFlag("run_mode", "PADDLE_RUN_MODE", "collective", "collective is the only one"),
    LauncherFlag(
        "job_id", "PADDLE_JOB_ID", "default", "name of the job; launchers of different jobs refuse each other"
    ),
    LauncherFlag("host", "POD_IP", "", "this node's address for the others"),
    LauncherFlag("ips", "PADDLE_IPS", "", "addresses of all nodes, by comma: gives --nnodes, --rank and --master"),
    LauncherFlag("start_port", "PADDLE_START_PORT", "", "take ports from here on; any free ones by default"),
    LauncherFlag("max_restart", "PADDLE_MAX_RESTART", "3", "how often to start the job again after a failure"),
    LauncherFlag("elastic_level", "PADDLE_ELASTIC_LEVEL", "-1", "0: never restart; -1 and 1: restart"),
    LauncherFlag(
        "elastic_timeout", "PADDLE_ELASTIC_TIMEOUT", "30", "seconds to wait for more nodes once the least are there"
    ),
)
COMMANDS = {"pretrain": True, "doctor": False, "profile": False}
"""Commands of polyreme itself that may stand in place of a script, and whether they start again after a failure."""
_CLI = "polyreme.cli.main"
_SUBMITTING = ("on", "job_options", "dry_run", "wait")
"""Flags that are for who submits a job, not for the launchers of its nodes."""
_ALIASES = {"gpus": "devices", "npus": "devices", "xpus": "devices"}
_SERVERS = ("servers", "trainers", "server_num", "trainer_num", "gloo_port", "with_gloo", "heter_workers")
_REFUSED = {
    **dict.fromkeys(_SERVERS, "is of parameter-server mode, which polyreme does not have: use collective mode"),
    "legacy": "chooses an old launcher that polyreme never had; leave it out",
    "sort_ip": "orders nodes by address; give each its --rank instead",
    "enable_gpu_log": "is not there; `nvidia-smi -l` logs what it did",
    "auto_parallel_config": "is not there; a plan is given in the script or its configuration",
    "auto_cluster_config": "is not there; a plan is given in the script or its configuration",
    "auto_tuner_json": "is not there; a plan is given in the script or its configuration",
}
_BY_NAME = {flag.name: flag for flag in FLAGS}


@dataclass(frozen=True)
class Options:
    """The command to launch and its settings; min_nodes < max_nodes if the job is elastic. num_processes 0: as devices
    say.

    script is a file, or with is_module the name of a module.
    """

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    master: Address | None = None
    node: int = -1
    min_nodes: int = 1
    max_nodes: int = 1
    num_processes: int = 0
    devices: tuple[int, ...] = ()
    log_dir: Path = field(default_factory=lambda: Path("log"))
    log_level: str = "INFO"
    log_overwrite: bool = False
    job_id: str = "default"
    host: str | None = None
    start_port: int | None = None
    max_restart: int = 3
    elastic_timeout: float = 30.0
    scheduler: str = "local"
    submission: Submission | None = None
    """With a scheduler: what it is to start; None in a launcher that it has started."""

    @property
    def signals_ranks(self) -> bool:
        """Whether ranks get the signals that their launcher gets, so that it need not pass them on."""
        return self.scheduler in SCHEDULERS and SCHEDULERS[self.scheduler].signals_ranks

    @property
    def is_single_node(self) -> bool:
        """Whether no other launcher is expected."""
        return self.max_nodes == 1


def parse(words: Sequence[str], environment: Mapping[str, str] | None = None) -> Options:
    """Options of a command line: flags, then the script, then the script's own arguments.

    Instead of a script, `-m module`, or a command of polyreme that trains (pretrain), which is looked for last.

    A flag that is not given is read from its environment variable, and a node's place in a scheduler's job from those
    that the scheduler sets. Raises ConfigError.

    >>> parse(["--nnodes", "2:4", "--master", "10.0.0.1:6070", __file__, "--lr", "1e-4"], {}).max_nodes
    4
    """
    environment = os.environ if environment is None else environment
    flag_texts, rest = _split_words(list(words))
    if not rest:
        raise ConfigError("launch: no script given; polyreme launch [flags] script.py [arguments of the script]")
    target = _target(rest)
    told = {flag.name: (environment.get(flag.env, ""), flag.env) for flag in FLAGS if environment.get(flag.env)}
    told |= {name: (text, f"--{name}") for name, text in flag_texts.items()}
    scheduler, place = _scheduled({name: text for name, (text, _) in told.items()}, environment)
    texts = {flag.name: (flag.default, flag.env) for flag in FLAGS}
    if scheduler is not None and place is not None:
        texts |= {name: (text, f"its place in {scheduler.name}'s job") for name, text in _place_texts(place).items()}
    texts |= told
    node_words = [f"--{name}={text}" for name, (text, _) in told.items() if name not in _SUBMITTING]
    return _OptionReader(texts).options(*target, scheduler, place, (*node_words, "--", *rest))


def _scheduled(told: Mapping[str, str], environment: Mapping[str, str]) -> tuple[Scheduler | None, NodePlace | None]:
    """The scheduler that runs the job, and this launcher's place in it if it has one.

    Left to itself (auto), a scheduler whose job has several nodes, unless flags say where the nodes are.
    """
    wanted = {"kubernetes": "k8s"}.get(told.get("on", "auto"), told.get("on", "auto"))
    if wanted not in ("auto", "local", *SCHEDULERS):
        near = did_you_mean(wanted, ["local", *SCHEDULERS])
        raise ConfigError(f"launch: --on {wanted}: give local, {', '.join(SCHEDULERS)} or auto{near}")
    if wanted in SCHEDULERS:
        return SCHEDULERS[wanted], SCHEDULERS[wanted].place(environment)
    says_nodes = any(told.get(name) for name in ("master", "rank", "ips")) or told.get("nnodes") == "1"
    for scheduler in SCHEDULERS.values() if wanted == "auto" and not says_nodes else ():
        place = scheduler.place(environment)
        if (place is not None and (place.nodes or 1) > 1) or scheduler.holds_nodes(environment):
            return scheduler, place
    return None, None


def _place_texts(place: NodePlace) -> dict[str, str]:
    """A place as the flags that would say the same."""
    texts = {"rank": place.node, "nnodes": place.nodes, "host": place.host, "master": place.master}
    return {name: str(value) for name, value in {**texts, "job_id": place.job_id}.items() if value is not None}


def help_text() -> str:
    """The text that --help prints."""
    width = max(len(flag.name) for flag in FLAGS)
    lines = []
    for flag in FLAGS:
        twin = [f"or {flag.env}"] if flag.env else []
        said = "; ".join(twin + ([f"default {flag.default}"] if flag.default else []))
        lines.append(f"  --{flag.name:{width}}  {flag.meaning}{f' ({said})' if said else ''}")
    usage = f"Usage: polyreme launch [flags] SCRIPT | -m MODULE | {' | '.join(COMMANDS)} [arguments of the script]"
    return "\n".join([usage, "", "Start a script in several processes and watch over them.", "", *lines])


def _split_words(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Flags given, and what comes from the script on."""
    values: dict[str, str] = {}
    while words and words[0].startswith("-") and words[0] not in ("-", "-m"):
        word = words.pop(0)
        if word == "--":
            break
        name, has_value, text = word.removeprefix("--").partition("=")
        flag = _flag(word, name.replace("-", "_"))
        if flag.is_switch:
            text = text if has_value else "1"
        elif not has_value:
            if not words:
                raise ConfigError(f"launch: --{name} needs a value: {flag.meaning}")
            text = words.pop(0)
        values[flag.name] = text
    return values, words


def _target(rest: list[str]) -> tuple[str, tuple[str, ...], bool]:
    """The target to run, its arguments, and whether it is a module. Raises ConfigError."""
    if rest[0] == "-m":
        if len(rest) < 2:
            raise ConfigError("launch: -m needs the name of a module, such as -m package.train")
        return rest[1], tuple(rest[2:]), True
    if Path(rest[0]).is_file():
        return rest[0], tuple(rest[1:]), False
    if rest[0] in COMMANDS:
        return _CLI, tuple(rest), True
    raise ConfigError(
        f"launch: {rest[0]}: no such file; after the launcher's flags give a script, -m and a module, or "
        f"{' or '.join(COMMANDS)}"
    )


def _flag(word: str, name: str) -> LauncherFlag:
    name = _ALIASES.get(name, name)
    if name in _REFUSED:
        raise ConfigError(f"launch: {word.partition('=')[0]} {_REFUSED[name]}")
    if name not in _BY_NAME or not word.startswith("--"):
        raise ConfigError(f"launch: unknown flag {word.partition('=')[0]}{did_you_mean(name, _BY_NAME)}")
    return _BY_NAME[name]


class _OptionReader:
    """Turns texts, each with where it comes from, into values."""

    def __init__(self, texts: Mapping[str, tuple[str, str]]) -> None:
        self._texts = texts

    def options(
        self,
        script: str,
        arguments: tuple[str, ...],
        is_module: bool,
        scheduler: Scheduler | None,
        place: NodePlace | None,
        words: tuple[str, ...],
    ) -> Options:
        self._one_of("run_mode", ("collective",), "polyreme has no parameter servers and no rpc mode")
        log_level = self._one_of("log_level", LOG_LEVELS, "give one of these", fold=True)
        restarts = self._whole("max_restart", 0)
        is_once = script == _CLI and not COMMANDS[arguments[0]]
        if self._one_of("elastic_level", ("-1", "0", "1"), "see --help") == "0" or is_once:
            restarts = 0
        submission = None
        if scheduler is not None and place is None:
            for name in ("master", "rank", "ips", "host"):
                if self._text(name) not in ("", "-1"):
                    raise self._refuse(name, f"is not for --on {scheduler.name}, which chooses the nodes; leave it out")
            nodes = self._nodes(True)
            submission = self._submission(scheduler, nodes, restarts, words)
        else:
            nodes = self._nodes(False)
            self._check_nothing_is_submitted(scheduler)
        return Options(
            script,
            arguments,
            is_module,
            **nodes,
            scheduler="local" if scheduler is None else scheduler.name,
            submission=submission,
            num_processes=self._whole("nproc_per_node", 1) if self._text("nproc_per_node") else 0,
            devices=self._devices(),
            log_dir=Path(self._text("log_dir")),
            log_level=log_level,
            log_overwrite=self._is_on("log_overwrite"),
            job_id=self._text("job_id"),
            host=self._text("host") or None,
            start_port=self._whole("start_port", 1) if self._text("start_port") else None,
            max_restart=restarts,
            elastic_timeout=float(self._whole("elastic_timeout", 0)),
        )

    def _text(self, name: str) -> str:
        return self._texts[name][0]

    def _refuse(self, name: str, needs: str) -> ConfigError:
        text, source = self._texts[name]
        return ConfigError(f"launch: {source} {text!r}: {needs}")

    def _whole(self, name: str, low: int) -> int:
        text = self._text(name)
        if not re.fullmatch(r"-?\d+", text) or int(text) < low:
            raise self._refuse(name, f"needs a whole number of at least {low}")
        return int(text)

    def _one_of(self, name: str, choices: Sequence[str], why: str, fold: bool = False) -> str:
        text = self._text(name).upper() if fold else self._text(name)
        if text not in [choice.upper() if fold else choice for choice in choices]:
            raise self._refuse(name, f"needs {' or '.join(repr(choice) for choice in choices if choice)}; {why}")
        return text

    def _devices(self) -> tuple[int, ...]:
        parts = [part.strip() for part in self._text("devices").split(",") if part.strip()]
        if not all(part.isdigit() for part in parts) or len(set(parts)) < len(parts):
            raise self._refuse("devices", "needs indexes of accelerators, each once, such as 0,1,2,3")
        return tuple(int(part) for part in parts)

    def _is_on(self, name: str) -> bool:
        return self._one_of(name, ("", "0", "1", "false", "true"), "give 1 or 0", fold=True) in ("1", "TRUE")

    def _submission(
        self, scheduler: Scheduler, nodes: Mapping[str, Any], restarts: int, words: tuple[str, ...]
    ) -> Submission:
        settings = read_settings(*self._texts["job_options"])
        check_settings(scheduler, settings)
        return Submission(
            words,
            nodes["min_nodes"],
            nodes["max_nodes"],
            self._text("job_id"),
            Path(self._text("log_dir")),
            restarts,
            flags.stop_grace(),
            settings,
            self._is_on("dry_run"),
            self._is_on("wait"),
        )

    def _check_nothing_is_submitted(self, scheduler: Scheduler | None) -> None:
        where = "--on local submits nothing" if scheduler is None else f"this launcher is in {scheduler.name}'s job"
        for name in ("dry_run", "wait") if scheduler is not None else ("dry_run", "wait", "job_options"):
            if self._text(name):
                raise self._refuse(name, f"is for a job that is submitted, and {where}; leave it out")

    def _nodes(self, is_submitted: bool = False) -> dict[str, Any]:
        low, _, high = self._text("nnodes").partition(":")
        if not low.isdigit() or not (high or low).isdigit() or not 1 <= int(low) <= int(high or low):
            raise self._refuse("nnodes", 'needs a number of nodes, such as 2, or a range, such as "2:4"')
        least, most = int(low), int(high or low)
        node = self._whole("rank", -1)
        address = Address.parse(self._text("master"), self._texts["master"][1]) if self._text("master") else None
        if self._text("ips"):
            return self._listed_nodes(node, address)
        if node >= most:
            raise self._refuse("rank", f"this job has {most} nodes, so ranks are 0 to {most - 1}; see --nnodes")
        if most > 1 and address is None and not is_submitted:
            raise ConfigError(
                f"launch: {most} nodes, but no --master: give every node the same host:port, of the node with --rank 0"
            )
        return {"min_nodes": least, "max_nodes": most, "node": node, "master": address}

    def _listed_nodes(self, node: int, address: Address | None) -> dict[str, Any]:
        """From --ips: the nodes in order; this one is where --host, else --rank, says."""
        hosts = [host.strip() for host in self._text("ips").split(",") if host.strip()]
        here = self._text("host")
        if len(hosts) > 1 and node < 0:
            if here not in hosts:
                raise self._refuse(
                    "ips", f"none of them is this node's --host ({here or 'not given'}); give it, or --rank"
                )
            node = hosts.index(here)
        if node >= len(hosts):
            raise self._refuse("rank", f"--ips lists {len(hosts)} nodes, so ranks are 0 to {len(hosts) - 1}")
        if len(hosts) > 1 and address is None:
            port = self._whole("start_port", 1) if self._text("start_port") else 6070
            address = Address(hosts[0], port)
        return {"min_nodes": len(hosts), "max_nodes": len(hosts), "node": max(node, 0), "master": address}
