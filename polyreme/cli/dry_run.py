"""What `polyreme pretrain --dry-run` prints: every setting with its origin, and what the run will cost."""

import json
from dataclasses import asdict

from polyreme.models.families import FAMILIES
from polyreme.recipes import estimate
from polyreme.recipes.config import RunConfig, digest, flatten
from polyreme.recipes.config_file import Loaded
from polyreme.recipes.planning.plan import memory_of
from polyreme.units import bytes_text


def describe(loaded: Loaded) -> str:
    """The report, as text."""
    return "\n".join([*_settings(loaded), "", *_costs(loaded.config)])


def _settings(loaded: Loaded) -> list[str]:
    rows = [("setting", "value", "from")]
    rows += [(key, _text(value), loaded.origin[key]) for key, value in flatten(loaded.config).items()]
    key_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{key:<{key_width}}  {value:<{value_width}}  {origin}" for key, value, origin in rows]


def _costs(config: RunConfig) -> list[str]:
    model, train = config.dimensions, config.train
    tokens = train.steps * config.tokens_per_step
    flops = estimate.run_flops_per_token(config)
    return [
        f"config      {digest(config)}",
        f"parameters  {estimate.num_parameters(model):,}",
        f"steps       {train.steps:,} of {config.tokens_per_step:,} tokens: {tokens:,} tokens in all",
        f"compute     {flops:,} FLOP a token, {flops * tokens:.2e} in all",
        f"memory      {_memory_text(config)}",
        "",
        str(config.parallel_plan),
    ]


def _memory_text(config: RunConfig) -> str:
    if FAMILIES[config.dimensions.family].shape is None:
        return f"not known: the planner knows no {config.dimensions.family}"
    memory = memory_of(config)
    parts = ", ".join(f"{name} {bytes_text(nbytes)}" for name, nbytes in asdict(memory).items())
    return f"about {bytes_text(memory.total)} a device: {parts}"


def _text(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
