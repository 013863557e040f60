"""Processor time by thread: what a step would take on cores of its own, but for waiting, where too few are free."""

from pathlib import Path

TASKS = Path("/proc/self/task")


def thread_seconds() -> dict[str, float]:
    """Processor seconds of each thread of this process. A device computes in one, and waits without computing."""
    return {task.name: int((task / "schedstat").read_text().split()[0]) / 1e9 for task in TASKS.iterdir()}


def spent_since(before: dict[str, float]) -> list[float]:
    """Processor seconds of each thread since thread_seconds gave this."""
    return [total - before.get(task, 0.0) for task, total in thread_seconds().items()]
