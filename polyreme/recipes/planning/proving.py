"""Proving that a configuration's plan trains as one device does."""

from __future__ import annotations

import jax

from polyreme.core.devices import place
from polyreme.distributed.prove import Proof, prove
from polyreme.recipes.config import RunConfig
from polyreme.recipes.samples import labels_of
from polyreme.recipes.training.trainer import (
    check_supported,
    count_of_config,
    learning_rate_schedule,
    loss_of_config,
    make_optimizer,
    step_policy,
)
from polyreme.recipes.weights.base import make_model


def run(config: RunConfig, *, steps: int) -> Proof:
    """Prove the configuration's plan over so many steps, on made-up samples of its batch's shape.

    Raises ConfigError for what pretraining does not support and PlacementError for a mesh of another size than the
    devices there are.
    """
    check_supported(config)
    if config.device is not None and config.device != "cpu":
        place.set_device(config.device)
    train = config.train
    plan = config.parallel_plan
    devices = None if plan.stage_devices else jax.devices()[: plan.mesh.size]
    if devices is not None:
        plan.mesh.check_devices(len(devices))
    return prove(
        lambda: make_model(config),
        plan,
        [(first, labels_of(rest)) for first, *rest in config.samples.draw.load()(config, steps)],
        optimizer=lambda model: make_optimizer(train, model, learning_rate_schedule(train)),
        policy=step_policy(train),
        devices=devices,
        seed=train.seed,
        loss=loss_of_config(config),
        count=count_of_config(config),
    )
