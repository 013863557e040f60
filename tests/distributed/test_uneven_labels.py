"""Labels that a loss leaves out: a batch's loss is the mean over all that count, however the batch is cut."""

import jax
import numpy as np
import pytest

from polyreme.core import rng
from polyreme.distributed.placement import clear_plan
from polyreme.distributed.planned_step import PlannedStep
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.optimizer import SGD
from polyreme.recipes.training.trainer import num_counted
from polyreme.training import StepPolicy

TOKENS = np.random.default_rng(0).integers(0, 128, (8, 17))
LABELS = np.where(np.arange(16) < np.array([16, 3, 0, 0, 1, 9, 16, 2])[:, None], TOKENS[:, 1:], -100)
"""Rows of which 16 to no tokens count: of four microbatches one has none."""


def loss_and_gradients(**plan):
    rng.seed(0)
    plan = Plan.from_degrees(**plan)
    try:
        step = PlannedStep(
            GPT(GPTConfig.nano()),
            plan,
            lambda model: SGD(0.1, parameters=model.parameters()),
            StepPolicy(),
            jax.devices()[: plan.mesh.size],
            count=num_counted,
        )
        loss, _ = step.step.gradients(step.cut(TOKENS[:, :-1], LABELS))
        gradients = {n: np.asarray(p._grad._array) for n, p in step.model.named_parameters()}
        return float(loss), gradients, float(step.evaluate(TOKENS[:, :-1], LABELS))
    finally:
        clear_plan()


@pytest.fixture(scope="module")
def whole():
    return loss_and_gradients()


@pytest.mark.slow
@pytest.mark.slow_cases("{'num_microbatches': 4}")
@pytest.mark.parametrize(
    "plan", [{"num_microbatches": 4}, {"num_microbatches": 2, "dp": 2}, {"num_microbatches": 4, "pp": 2}], ids=str
)
def test_the_loss_is_the_mean_over_all_labels_that_count(whole, plan):
    loss, gradients, evaluated = loss_and_gradients(**plan)
    eps = 2.0**-23
    assert loss == pytest.approx(whole[0], rel=47 * eps)  # 47 labels
    assert evaluated == pytest.approx(whole[2], rel=47 * eps)
    for name, gradient in gradients.items():
        # sums of 47 tokens' terms, of which the largest element bounds each, through two layers
        bound = 8 * np.sqrt(47) * eps * np.abs(whole[1][name]).max()
        np.testing.assert_allclose(gradient, whole[1][name], rtol=0, atol=bound, err_msg=name)
