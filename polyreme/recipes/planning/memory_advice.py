"""Changes that make a configuration fit, with the memory that each saves by the planner's prediction."""

from __future__ import annotations

from collections.abc import Iterator

from polyreme.errors import ConfigError, PlacementError
from polyreme.models.families import FAMILIES
from polyreme.recipes.config import RunConfig
from polyreme.recipes.config_file import Loaded, load
from polyreme.recipes.planning.plan import memory_of
from polyreme.units import bytes_text


def cheapest_changes(loaded: Loaded, most: int = 3) -> list[tuple[str, int]]:
    """(settings as they are given on the command line, bytes a device that they save), the least loss of speed first.

    Empty for a family whose memory the planner does not know.
    """
    if FAMILIES[loaded.config.dimensions.family].shape is None:
        return []
    before = memory_of(loaded.config).total
    result: list[tuple[str, int]] = []
    for words in _changes(loaded.config):
        try:
            config = load(loaded.path, [*loaded.overrides, *words], type(loaded.config)).config
            saving = int(before - memory_of(config).total)
        except (ConfigError, PlacementError):  # a change that this configuration does not allow
            continue
        if saving > 0:
            result.append((" ".join(words), saving))
        if len(result) == most:
            break
    return result


def _changes(config: RunConfig) -> Iterator[list[str]]:
    """From what makes a step faster, through what costs exchanges, to what computes or moves things again."""
    train, plan = config.train, config.plan
    if train.amp_level == "O0":
        yield ["train.amp_level=O1"]
    yield [f"train.accumulation={2 * train.accumulation}"]
    if plan.sharding > 1 and plan.sharding_stage < 3:
        yield ["plan.sharding_stage=3"]
    if plan.dp > 1 and plan.dp % 2 == 0:  # the same devices hold parts where they held copies
        yield [f"plan.dp={plan.dp // 2}", f"plan.sharding={2 * plan.sharding}", "plan.sharding_stage=3"]
    if plan.recompute != "full":
        yield ["plan.recompute=full"]
    if not plan.offload:
        yield ["plan.offload=[state]"]


def advice(loaded: Loaded) -> str:
    """The changes as a line, empty without any."""
    found = cheapest_changes(loaded)
    numbered = [f"{i}) {words}: {bytes_text(saving)} a device less" for i, (words, saving) in enumerate(found, 1)]
    return f"The cheapest changes, as the planner predicts: {'; '.join(numbered)}" if numbered else ""
