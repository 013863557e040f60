"""Rules for resuming: the settings that may change between a run and its continuation, and the error for one that may
not."""

from collections.abc import Mapping
from typing import Any

from polyreme.errors import ConfigError, DataError
from polyreme.recipes.config import RunConfig, flatten

# These change where and how the same numbers are computed, kept or shown, not which; or what is done with steps that
# have none. Data, and the weights of a model that is fine-tuned, are compared by content.
_MAY_CHANGE = {
    "train.steps", "train.accumulation", "train.non_finite", "train.max_skipped", "train.replica_interval",
    "data.text", "data.train", "data.validation", "model",
    "data.skip_bad", "data.cache", "data.num_workers", "data.worker_timeout", "output", "device",
}  # fmt: skip
_SECTIONS_THAT_MAY_CHANGE = ("log.", "checkpoint.", "plan.", "profile.")


def changes(saved: Mapping[str, Any], config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from the saved ones, as {dotted key: (saved, now)}; saved is what flatten gave then.

    >>> from polyreme.recipes.config import PretrainConfig
    >>> changes({"train.steps": 10}, PretrainConfig())["train.steps"]
    (10, 400)
    """
    now = flatten(config)
    keys = dict.fromkeys([*saved, *now])
    return {key: (saved.get(key), now.get(key)) for key in keys if saved.get(key) != now.get(key)}


def check_config(saved: Mapping[str, Any], config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The changes, all of them allowed; raises ConfigError listing those under which a run cannot go on exactly."""
    changed = changes(saved, config)
    refused = {key: pair for key, pair in changed.items() if not _may_change(key)}
    if refused:
        listed = ", ".join(f"{key} was {before!r}, is {after!r}" for key, (before, after) in refused.items())
        raise ConfigError(
            f"cannot resume, the configuration has changed: {listed}; put these back, or start anew with "
            "--resume never and another output"
        )
    return changed


def describe(changed: Mapping[str, tuple[Any, Any]], step: int, saved_lr: float, lr: float) -> list[str]:
    """One line for each change, as a person reads it; saved_lr and lr are the step's rates before and after it.

    >>> describe({"plan.dp": (2, 1)}, 11, 0.1, 0.1)
    ['plan.dp: 2 -> 1']
    """
    lines = [f"{key}: {before!r} -> {after!r}" for key, (before, after) in changed.items()]
    if "train.steps" in changed:
        lines.append(
            f"the learning rate follows the schedule of {changed['train.steps'][1]} steps from here on: {lr:.3g} at "
            f"step {step}, where that of {changed['train.steps'][0]} steps has {saved_lr:.3g}"
        )
    return lines


def check_data(saved_digest: str, digest: str) -> None:
    """Raises DataError if the data prepared now (Corpus.digest) is not what the saved run was reading."""
    if saved_digest != digest:
        raise DataError(
            f"cannot resume: the training data has changed (digest {digest[:12]}, was {saved_digest[:12]}); "
            "give the run the data it began with, or start anew with --resume never and another output"
        )


def _may_change(key: str) -> bool:
    return key in _MAY_CHANGE or key.startswith(_SECTIONS_THAT_MAY_CHANGE)
