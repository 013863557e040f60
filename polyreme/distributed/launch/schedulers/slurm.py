"""SLURM: one launcher a node in a step of srun, in an allocation that is there or that sbatch waits for."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping

from polyreme.distributed.job.rendezvous import Address
from polyreme.distributed.launch.schedulers.base import EXIT_CODE_FILE, NodePlace, Scheduler, Submission, joined_code
from polyreme.errors import EXIT_PREEMPTED, ConfigError

_FIRST_PORT, _NUM_PORTS = 20000, 10000  # below those that Linux gives to connections, so that a job's is seldom taken
_MOST_HOSTS = 1 << 20  # of a list; more is a mistake
_PART = re.compile(r"(?:[^,\[\]\s]|\[[\d,-]+\])+")
_LIST = re.compile(rf"{_PART.pattern}(?:,{_PART.pattern})*")


class Slurm(Scheduler):
    """Outside of a job it submits a script with sbatch, in an allocation it starts the step itself.

    A launcher in a step reads its place from SLURM_*. A node that is lost does not end the step of the others where the
    job may have fewer.
    """

    name = "slurm"
    signals_ranks = True  # to every process of a step that it tracks, whatever session it is in

    def place(self, environment: Mapping[str, str]) -> NodePlace | None:
        if "SLURM_STEP_NODELIST" not in environment:
            return None
        hosts = hostnames(environment["SLURM_STEP_NODELIST"])
        node, job = int(environment.get("SLURM_NODEID", "0")), environment.get("SLURM_JOB_ID", "0")
        if environment.get("SLURM_LOCALID", "0") != "0":
            raise ConfigError(
                "launch: srun started several launchers on a node; give it --ntasks-per-node=1, and processes to the "
                "launcher with --nproc_per_node"
            )
        port = _FIRST_PORT + int(job) % _NUM_PORTS if job.isdigit() else _FIRST_PORT
        return NodePlace(node, len(hosts), _address(hosts[node]), Address(_address(hosts[0]), port), f"slurm-{job}")

    def holds_nodes(self, environment: Mapping[str, str]) -> bool:
        if "SLURM_STEP_NODELIST" in environment or "SLURM_JOB_NODELIST" not in environment:
            return False
        return len(hostnames(environment["SLURM_JOB_NODELIST"])) > 1

    def submit(self, job: Submission) -> int:
        if self.holds_nodes(os.environ):
            return self._start_step(job)
        script = batch_script(job)
        if job.is_dry:
            sys.stdout.write(script)
            return 0
        _check_program("sbatch")
        job.log_dir.mkdir(parents=True, exist_ok=True)
        path = job.log_dir / "job.sbatch"
        path.write_text(script)
        words = ["sbatch", *(["--wait"] if job.waits else []), str(path)]
        done = subprocess.run(words, check=False)
        return joined_code(job.log_dir, done.returncode) if job.waits else done.returncode

    def _start_step(self, job: Submission) -> int:
        """Run the job over the nodes of the allocation that this process is in; returns the job's exit code."""
        words = step_command(job)
        if job.is_dry:
            sys.stdout.write(shlex.join(words) + "\n")
            return 0
        _check_program("srun")
        (job.log_dir / EXIT_CODE_FILE).unlink(missing_ok=True)
        return joined_code(job.log_dir, subprocess.run(words, check=False).returncode)


def step_command(job: Submission) -> list[str]:
    """srun with one launcher a node, over the whole allocation."""
    lost = ["--no-kill"] if job.is_elastic else []
    # a launcher that ends badly says so to the others itself; srun would end them before they can end their ranks
    flags = ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none", *lost]
    return ["srun", *flags, *job.command("--on", Slurm.name)]


def batch_script(job: Submission) -> str:
    """The script that sbatch takes: asks for nodes, runs the step, asks for another turn if the job saved and left."""
    count = f"{job.min_nodes}-{job.max_nodes}" if job.is_elastic else f"{job.max_nodes}"
    log_dir = shlex.quote(str(job.log_dir))
    settings = {
        "job-name": job.name,
        "nodes": count,
        "ntasks-per-node": "1",
        "output": f"{job.log_dir}/slurm-%j.out",
        "open-mode": "append",  # of a job that is run again
        "signal": f"TERM@{job.grace:.0f}",  # before its time is over, so that ranks can save
        "requeue": "",
        **({"no-kill": ""} if job.is_elastic else {}),
    }
    settings |= job.settings
    lines = [f"#SBATCH --{name}{f'={_quoted(value)}' if value else ''}" for name, value in settings.items()]
    code_file = f"{log_dir}/{EXIT_CODE_FILE}"
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "",
            "# what the launchers of this job show each other",
            "export POLYREME_JOB_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')",
            f"rm -f {code_file}",
            shlex.join(step_command(job)),
            "code=$?",
            "# srun tells the worst code of all launchers, that of a lost node too; node 0 knows the job's",
            f"if [ -s {code_file} ]; then code=$(cat {code_file}); fi",
            f"if [ $code -eq {EXIT_PREEMPTED} ]; then scontrol requeue $SLURM_JOB_ID; fi",
            "exit $code",
            "",
        ]
    )


def hostnames(text: str) -> list[str]:
    """The nodes of a list as SLURM writes it, in order.

    >>> hostnames("login,gpu[08-10,12],rack[1-2]n[1-2]")
    ['login', 'gpu08', 'gpu09', 'gpu10', 'gpu12', 'rack1n1', 'rack1n2', 'rack2n1', 'rack2n2']
    """
    if not _LIST.fullmatch(text):
        raise _no_list(text)
    hosts: list[str] = []
    for part in _PART.findall(text):
        pieces = [_numbers(piece, text) if at % 2 else [piece] for at, piece in enumerate(re.split(r"[\[\]]", part))]
        hosts += ["".join(chosen) for chosen in itertools.product(*pieces)]
        if len(hosts) > _MOST_HOSTS:
            raise _no_list(text)
    return hosts


def _numbers(text: str, whole: str) -> list[str]:
    """The numbers between brackets: single ones and ranges, with their leading zeros."""
    return list(itertools.chain.from_iterable(_range(part, whole) for part in text.split(",")))


def _range(part: str, whole: str) -> Iterator[str]:
    low, dash, high = part.partition("-")
    if not low.isdigit() or (dash and not high.isdigit()) or (dash and not 0 <= int(high) - int(low) < _MOST_HOSTS):
        raise _no_list(whole)
    width = len(low)
    yield from (f"{number:0{width}d}" for number in range(int(low), int(high or low) + 1))


def _no_list(text: str) -> ConfigError:
    return ConfigError(f"launch: {text[:80]!r} is no list of SLURM's nodes, such as gpu[01-04,7]")


def _address(host: str) -> str:
    """A node's name, or where nobody knows it, the address that SLURM has of it."""
    with contextlib.suppress(OSError):
        socket.getaddrinfo(host, None)
        return host
    if shutil.which("scontrol"):
        words = ["scontrol", "show", "node", "--oneliner", host]
        told = subprocess.run(words, capture_output=True, text=True, check=False).stdout
        address = re.search(r"\bNodeAddr=(\S+)", told)
        return address[1] if address else host
    return host


def _quoted(value: str) -> str:
    return value if re.fullmatch(r"[\w.,:;/%@+*=\-\[\]]+", value) else f'"{value}"'


def _check_program(name: str) -> None:
    if shutil.which(name) is None:
        raise ConfigError(
            f"launch: --on slurm: {name} is not here; run it where SLURM's commands are, or use --dry_run"
        )
