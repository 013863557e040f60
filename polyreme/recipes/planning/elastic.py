"""A run on other devices than its plan is for: the planner's best plan for those that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from polyreme.core.devices import place
from polyreme.core.engine.backend import Device
from polyreme.distributed.auto_parallel.engine.choose import cluster_of
from polyreme.distributed.communication.objects import broadcast_object_list
from polyreme.errors import ConfigError
from polyreme.mesh import Plan
from polyreme.recipes.config import PretrainConfig
from polyreme.recipes.planning.plan import answer, plan_words, with_plan
from polyreme.recipes.training.run import join_processes


def fitted(config: PretrainConfig, report: Callable[[str], None] = lambda line: None) -> PretrainConfig:
    """The configuration, with another plan if the job has not as many devices as its own is for.

    Joins the processes of the job first. The first of them chooses, from what it knows of its devices, and tells the
    others. Raises ConfigError where no plan fits the devices that are there.
    """
    join_processes()
    if config.device not in (None, "cpu"):
        place.set_device(config.device)
    devices = jax.devices()
    if len(devices) == config.plan.num_devices:
        return config
    values: list[Any] = [None]
    if jax.process_index() == 0:
        values = [_choose(config, devices)]
    if jax.process_count() > 1:
        broadcast_object_list(values, 0)
    if isinstance(values[0], str):
        raise ConfigError(values[0])
    plan = Plan.from_dict(values[0])
    report(f"{len(devices)} devices, the plan is for {config.plan.num_devices}: going on with {plan_words(plan)}")
    return with_plan(config, plan)


def _choose(config: PretrainConfig, devices: Sequence[Device]) -> dict[str, Any] | str:
    """The best plan as plain values; why there is none."""
    found = answer(config, cluster_of(devices), top=1)
    if found.chosen is not None:
        return dict(found.search.plans[found.chosen].plan.to_dict())
    return (
        f"plan.elastic: {len(devices)} devices are left of {config.plan.num_devices}, and no plan fits them (polyreme "
        f"plan --devices {len(devices)} says why); give the job more nodes, or a smaller model"
    )
