"""Proving that a configuration's plan trains as one device does."""

from __future__ import annotations

import jax
import numpy as np

from polyreme.core import place
from polyreme.distributed.prove import Proof, prove
from polyreme.recipes.build import build_model
from polyreme.recipes.config import PretrainConfig
from polyreme.recipes.training import check_supported, learning_rate_schedule, make_optimizer, step_policy


def run(config: PretrainConfig, *, steps: int) -> Proof:
    """Prove the configuration's plan over so many steps, on random tokens of its batch's shape.

    Raises ConfigError for what pretraining does not support and PlacementError for a mesh of another size than the
    devices there are.
    """
    check_supported(config)
    if config.device is not None and config.device != "cpu":
        place.set_device(config.device)
    train, model = config.train, config.model
    shape = (steps, train.global_batch, model.seq_len + 1)
    tokens = np.random.default_rng(train.seed).integers(0, model.vocab_size, shape)
    plan = config.parallel_plan
    plan.mesh.check_devices(min(plan.mesh.size, len(jax.devices())))
    return prove(
        lambda: build_model(model),
        plan,
        [(rows[:, :-1], rows[:, 1:]) for rows in tokens],
        optimizer=lambda model: make_optimizer(train, model, learning_rate_schedule(train)),
        policy=step_policy(train),
        devices=jax.devices()[: plan.mesh.size],
        seed=train.seed,
    )
