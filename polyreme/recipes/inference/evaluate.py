"""`polyreme eval`: tasks put to a run, to published weights, or to a server, and the rows that are kept of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from polyreme.errors import ConfigError
from polyreme.evaluation import TASKS, EngineScorer, EvalOptions, Scorer, ServerScorer, TaskResult
from polyreme.evaluation.harness import run_harness
from polyreme.generation.engine import TextEngine
from polyreme.models.files import packages
from polyreme.models.parts.cache import check_cache_dtype
from polyreme.recipes.weights.trained import ONE_DEVICE, dtype_of, load_writer

HARNESS = "lm_eval:"


def open_scorer(
    target: str,
    dtype: str | None = None,
    key: str | None = None,
    adapter: Path | None = None,
    kv_cache_dtype: str | None = None,
) -> Scorer:
    """The scorer of the server at an address, or of a run, a folder, a GGUF file or a fetched name; adapter,
    kv_cache_dtype: as of load_writer and TextEngine.

    Raises ConfigError for settings that a server has for itself, and what reading weights raises.
    """
    check_cache_dtype(kv_cache_dtype)
    if target.startswith(("http://", "https://")):
        for name, value in (("dtype", dtype), ("adapter", adapter), ("kv-cache-dtype", kv_cache_dtype)):
            if value is not None:
                raise ConfigError(f"--{name} {value}: {target} serves its model as it was started; leave it out")
        return ServerScorer(target, key)
    path = packages.resolve(target)
    model, tokenizer = load_writer(path, dtype, adapter)
    # sizes as the server has them, so that numbers are the server's, bit for bit
    engine = TextEngine(model, tokenizer.end, tokenizer.vocab_size, kv_cache_dtype=kv_cache_dtype)
    facts = {"model": path.name, "dtype": dtype_of(model), "plan": ONE_DEVICE}
    if adapter is not None:
        facts["adapter"] = str(adapter)
    if kv_cache_dtype is not None:
        facts["kv_cache_dtype"] = kv_cache_dtype
    return EngineScorer(engine, tokenizer, facts)


def check_tasks(names: Sequence[str]) -> None:
    """Raises ConfigError for a task that there is not, and for none at all, before a model is loaded."""
    if not names:
        raise ConfigError(f"no task is named; give some of {', '.join(TASKS)}")
    for name in names:
        if not name.startswith(HARNESS):
            TASKS.named(TASKS.canonical_name(name))


def evaluate(
    scorer: Scorer, names: Sequence[str], options: EvalOptions, data: Sequence[Path], include: Path | None = None
) -> Iterator[TaskResult]:
    """The result of each task, as it is done. Raises ConfigError for a task that lacks its data, and for data that no
    task reads."""
    tasks = [TASKS.named(TASKS.canonical_name(name)) for name in names if not name.startswith(HARNESS)]
    unread = next((path for path in data if not any(task.takes(path) for task in tasks)), None)
    if unread is not None:
        raise ConfigError(f"--data {unread}: none of the tasks {', '.join(names)} reads it; leave it out, or name one")
    for name in names:
        if name.startswith(HARNESS):
            yield from run_harness(scorer, name.removeprefix(HARNESS), options, include)
        else:
            yield TASKS.named(TASKS.canonical_name(name))(scorer, options, data)


def result_lines(result: TaskResult) -> Iterator[str]:
    """A result as text."""
    numbers = (
        f"{name} {value}" if isinstance(value, int) else f"{name} {value:.4f}" for name, value in result.metrics.items()
    )
    yield f"{result.task}: {', '.join(numbers)} ({result.num_samples} samples)"


def write_rows(path: Path, results: Sequence[TaskResult]) -> None:
    """Add results to a file, an object a line."""
    try:
        with path.open("a", encoding="utf-8") as file:
            for result in results:
                file.write(json.dumps(result.as_row(), ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}; give another path") from None
