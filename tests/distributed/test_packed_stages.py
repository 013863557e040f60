"""Documents that share rows, over pipeline stages: none sees another, and all is equal to one device."""

import jax
import numpy as np
import pytest

from polyreme.distributed.prove import prove
from polyreme.mesh import Plan
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.optimizer import SGD
from polyreme.recipes.training.trainer import num_counted

SIZES = [[5, 1, 8, 2], [2, 7, 6, 1]]
"""Tokens of the documents of a row; the first four rows of a batch have the first ones, the others the second."""


def packed_rows(seed):
    """Inputs [8, 3, 16] and labels [8, 16], a third of which no loss counts."""
    rng = np.random.default_rng(seed)
    ends = np.repeat([np.repeat(np.cumsum(sizes), sizes) for sizes in SIZES], 4, 0)
    places = np.repeat([np.concatenate([np.arange(size) for size in sizes]) for sizes in SIZES], 4, 0)
    labels = np.where(rng.random((8, 16)) < 0.3, -100, rng.integers(0, 128, (8, 16)))
    return np.stack([rng.integers(0, 128, (8, 16)), ends, places], 1), labels


@pytest.mark.slow_cases("ZBH1 x mp x recompute", "1F1B")
@pytest.mark.parametrize(
    "plan",
    [
        {"pp": 2, "num_microbatches": 2},
        {"pp": 2, "mp": 2, "schedule": "ZBH1", "num_microbatches": 4, "recompute": "full"},
    ],
    ids=["1F1B", "ZBH1 x mp x recompute"],
)
def test_stages_send_the_documents_of_rows(plan):
    plan = Plan.from_degrees(**plan)
    proof = prove(
        lambda: Llama(LlamaConfig.nano()),
        plan,
        [packed_rows(0)],
        optimizer=lambda model: SGD(0.1, parameters=model.parameters()),
        devices=jax.devices()[: plan.mesh.size],
        count=num_counted,
    )
    assert proof.holds, str(proof)
