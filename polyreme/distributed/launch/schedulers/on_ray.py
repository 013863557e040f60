"""Ray: a placement group with an actor on each node, which runs the launcher there and shows what it says."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyreme.distributed.job.rendezvous import Address, free_port
from polyreme.distributed.launch.schedulers.base import NodePlace, Scheduler, Submission, count_of
from polyreme.errors import EXIT_WATCHDOG, ConfigError

_EXEC = Path(__file__).parent.parent / "exec_worker.py"
_PASSED_ON = re.compile(r"(POLYREME|PADDLE|FLAGS|JAX|XLA|NCCL|TF_CPP|HF|OMP)_\w+|CPU_NUM|FAULTS|PYTHONPATH")
_POLL = 1.0  # seconds between two looks for a signal
_PLACING_SECONDS = 120.0


class Ray(Scheduler):
    """The command stays until the job has ended. An actor that is lost is a lost node to the other launchers; if it was
    that of node 0, the job is placed anew on the nodes that are left."""

    name = "ray"
    takes: tuple[str, ...] = ("address", "cpus", "gpus")

    def place(self, environment: Mapping[str, str]) -> NodePlace | None:
        return None  # an actor tells its launcher its place by flags

    def submit(self, job: Submission) -> int:
        settings = job.settings
        bundle = {"CPU": count_of(settings, "cpus") or 1}
        if count_of(settings, "gpus"):
            bundle["GPU"] = count_of(settings, "gpus")
        if job.is_dry:
            nodes = f"{job.min_nodes} to {job.max_nodes}" if job.is_elastic else str(job.max_nodes)
            sys.stdout.write(f"a placement group of {nodes} bundles {bundle}, each on a node of its own, and there\n")
            sys.stdout.write(shlex.join(job.command()) + "\n")
            return 0
        ray = _ray()
        is_ours = not ray.is_initialized()
        if is_ours:
            try:
                ray.init(address=settings.get("address", "auto"), log_to_driver=True)
            except (ConnectionError, ValueError) as error:
                raise ConfigError(
                    f"launch: --on ray: no cluster ({error}); start one, or give --job_options address=HOST:PORT"
                ) from None
        try:
            return _RayJob(ray, job, bundle).run()
        finally:
            if is_ours:
                ray.shutdown()


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise ConfigError("launch: --on ray needs Ray; run pip install polyreme[ray]") from None


class NodeRunner:
    """The actor: runs a node's launcher as its child, in the folder that the job was submitted from."""

    def __init__(self, folder: str, variables: Mapping[str, str]) -> None:
        self._folder, self._variables = folder, variables
        self._process: subprocess.Popen | None = None

    def host(self) -> str:
        """This node's address."""
        return _ray().util.get_node_ip_address()

    def address(self) -> str:
        """This node's address with a port that nobody listens on."""
        return str(Address(self.host(), free_port(self.host())))

    def run(self, words: Sequence[str]) -> int:
        """Run the launcher; its exit code. What it says is printed, and Ray shows it where the job was submitted."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_EXEC), str(os.getpid()), *words],
            cwd=self._folder,
            env={**os.environ, **self._variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
        return self._process.wait()

    def send_signal(self, number: int) -> None:
        """To the launcher, which passes it on to its ranks."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


class _RayJob:
    """A submitted job: the actors of this attempt at placing it, and what they came to."""

    def __init__(self, ray: Any, job: Submission, bundle: Mapping[str, int]) -> None:
        self._ray, self._job, self._bundle = ray, job, dict(bundle)
        self._groups = importlib.import_module("ray.util.placement_group")
        self._strategies = importlib.import_module("ray.util.scheduling_strategies")
        self._signals: list[int] = []

    def run(self) -> int:
        before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            for _ in range(self._job.max_restart + 1):
                code = self._run_once()
                if code is not None:
                    return code
                sys.stderr.write("polyreme launch: node 0 is lost; placing the job on the nodes that are left\n")
            return EXIT_WATCHDOG
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self._signals.append(number)

    def _run_once(self) -> int | None:
        """The job's exit code; None if node 0 was lost with its actor."""
        ray, job = self._ray, self._job
        group = self._placed()
        try:
            actors = self._actors(group)
            master = ray.get(actors[0].address.remote())
            count = f"{job.min_nodes}:{len(actors)}"
            calls = []
            for node, actor in enumerate(actors):
                own = ray.get(actor.host.remote())
                place = ["--on", "local", "--nnodes", count, "--rank", str(node), "--master", master, "--host", own]
                calls.append(actor.run.remote(job.command(*place)))
            return self._wait(actors, calls)
        finally:
            self._groups.remove_placement_group(group)

    def _placed(self) -> Any:
        """A placement group of as many nodes as there are, most first."""
        job = self._job
        fitting = sum(
            all(node["Resources"].get(kind, 0) >= count for kind, count in self._bundle.items())
            for node in self._ray.nodes()
            if node["Alive"]
        )
        count = min(job.max_nodes, fitting)
        if count < job.min_nodes:
            raise ConfigError(
                f"launch: --on ray: {fitting} nodes have {self._bundle}, the job needs {job.min_nodes}; lower --nnodes "
                "or --job_options cpus and gpus, or add nodes"
            )
        group = self._groups.placement_group([self._bundle] * count, strategy="STRICT_SPREAD")
        if not group.wait(_PLACING_SECONDS):
            self._groups.remove_placement_group(group)
            raise ConfigError(
                f"launch: --on ray: {count} x {self._bundle} could not be placed in {_PLACING_SECONDS:g} s; what else "
                "runs there (ray status)?"
            )
        return group

    def _actors(self, group: Any) -> list[Any]:
        ray = self._ray
        variables = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
        variables.setdefault("POLYREME_JOB_TOKEN", os.urandom(16).hex())
        remote = ray.remote(NodeRunner)
        actors = []
        for at in range(group.bundle_count):
            strategy = self._strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=at)
            options = {"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0), "max_concurrency": 2}
            actors.append(remote.options(scheduling_strategy=strategy, **options).remote(os.getcwd(), variables))
        return actors

    def _wait(self, actors: Sequence[Any], calls: Sequence[Any]) -> int | None:
        ray = self._ray
        waiting = list(calls)
        codes: dict[int, int | None] = {}
        while waiting:
            while self._signals:
                number = self._signals.pop(0)
                for node, actor in enumerate(actors):
                    if node not in codes:
                        actor.send_signal.remote(number)
            done, waiting = ray.wait(waiting, timeout=_POLL)
            for call in done:
                node = calls.index(call)
                try:
                    codes[node] = ray.get(call)
                except ray.exceptions.RayActorError:
                    codes[node] = None
                    sys.stderr.write(f"polyreme launch: the actor of node {node} is lost\n")
        return codes[0]
