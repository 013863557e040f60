"""Schedulers: how a launcher is started on each node of a job, and how it learns its place.

Everything else is the launcher's own wherever it runs: ranks, their names and logs, verdicts, restarts, exit codes.
"""

from polyreme.distributed.launch.schedulers.base import NodePlace, Scheduler, Submission
from polyreme.distributed.launch.schedulers.kubernetes import Kubernetes
from polyreme.distributed.launch.schedulers.on_ray import Ray
from polyreme.distributed.launch.schedulers.slurm import Slurm

SCHEDULERS: dict[str, Scheduler] = {scheduler.name: scheduler for scheduler in (Slurm(), Ray(), Kubernetes())}
"""By the names that --on takes, besides local and auto."""

__all__ = ["SCHEDULERS", "NodePlace", "Scheduler", "Submission"]
