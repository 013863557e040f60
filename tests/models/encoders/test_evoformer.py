"""Evoformer: AlphaFold 2's order in NumPy; dynamic axial parallelism, equal to one device, and what it sends."""

from collections import Counter

import numpy as np
import pytest

from polyreme.core import rng
from polyreme.distributed.comm_report.collectives import find_collectives
from polyreme.distributed.placement import apply_plan, clear_plan, shard_batch
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.models.encoders.evoformer import EvoformerBlock, EvoformerConfig, EvoformerStack
from tests.models.encoders import evoformer_reference as reference

BATCH, ROWS, RESIDUES = 2, 4, 8


def settle(model, dtype="float64"):
    """Values for every weight, zeros and ones of the initial ones included."""
    model.to(dtype=dtype)
    generator = np.random.default_rng(3)
    for p in model.parameters():
        p.set_value(generator.standard_normal(p.shape).astype(dtype) * 0.4)
    return model


def arrays(config, dtype="float64"):
    generator = np.random.default_rng(4)
    msa = generator.standard_normal((BATCH, ROWS, RESIDUES, config.msa_width))
    pair = generator.standard_normal((BATCH, RESIDUES, RESIDUES, config.pair_width))
    msa_mask = np.ones((BATCH, ROWS, RESIDUES))
    msa_mask[1, 2:] = msa_mask[:, :, -1] = 0
    pair_mask = np.ones((BATCH, RESIDUES, RESIDUES))
    pair_mask[:, -1] = pair_mask[:, :, -1] = 0
    return [a.astype(dtype) for a in (msa, pair, msa_mask, pair_mask)]


@pytest.mark.slow_cases("first", "end")
@pytest.mark.parametrize("where", ["origin", "first", "end"])
def test_a_block_is_alphafolds_and_sends_what_axial_parallelism_does(where):
    config = EvoformerConfig.nano(outer_product_mean=where, global_columns=where == "first")
    block, inputs = settle(EvoformerBlock(config)), arrays(config)
    block.eval()
    layout = apply_plan(plan := Plan.from_degrees(dp=2, sep=4), block)
    try:
        split = [("msa_rows", None, None), ("pair_rows", None, None), (None, None), (None, None)]
        placed = [shard_batch(layout, a, "batch", *dims) for a, dims in zip(inputs, split, strict=True)]
        forward = to_static(block.forward)
        program = forward.compiled(*placed).as_text()
        got = [result.numpy() for result in forward(*placed)]
    finally:
        clear_plan()
    assert Counter((c.kind, c.axes) for c in find_collectives(program, plan.mesh)) == {
        ("all-to-all", ("sep",)): 8 if where == "first" else 6,
        ("all-gather", ("sep",)): 6,
    }
    weights = reference.Weights({name: value.numpy() for name, value in block.state_dict().items()})
    for b in range(BATCH):
        want = reference.block(weights, *(a[b] for a in inputs), where, config.global_columns and config.msa_heads)
        for have, wanted in zip(got, want, strict=True):
            # a chain of sums of at most 8 * 16 terms
            np.testing.assert_allclose(have[b], wanted, rtol=0, atol=2**-52 * 2**12 * np.abs(wanted).max())


def objective(model, inputs):
    msa, pair, *masks = inputs
    out = model(msa, pair, msa_mask=masks[0], pair_mask=masks[1])
    return sum((x * x).mean() for x in out)


def results(make, config, plan):
    """Loss and gradients of parameters and inputs of one training step, under a plan."""
    rng.seed(6)
    model = settle(make(config))
    inputs = [to_tensor(a, stop_gradient=i > 1) for i, a in enumerate(arrays(config))]
    if plan is not None:
        apply_plan(plan, model)
    try:

        @to_static
        def step(*inputs):
            loss = objective(model, inputs)
            loss.backward()
            return loss

        loss = step(*inputs)
        leaves = dict(model.named_parameters()) | {"msa": inputs[0], "pair": inputs[1]}
        return {"loss": loss.numpy()} | {name: leaf.grad.numpy() for name, leaf in leaves.items()}
    finally:
        clear_plan()


def assert_equal(got, want):
    assert got.keys() == want.keys()
    largest = max(np.abs(a).max() for a in want.values())
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, rtol=0, atol=2**-52 * 2**12 * largest, err_msg=name)


@pytest.mark.slow
def test_axial_parallelism_equals_one_device():
    config = EvoformerConfig.nano(recompute="full")
    plan = Plan.from_degrees(dp=2, sep=2, sharding=2, sharding_stage=3)
    assert_equal(results(EvoformerStack, config, plan), results(EvoformerStack, config, None))


@pytest.mark.slow
def test_branches_with_axial_and_data_parallelism_equal_one_device():
    config = EvoformerConfig.nano(recompute="full", outer_product_mean="end")
    plan = Plan.from_degrees(dp=2, sep=2, mp=2, branch_axis="mp")
    assert_equal(results(EvoformerStack, config, plan), results(EvoformerStack, config, None))


def test_refuses_what_there_is_not():
    with pytest.raises(ConfigError, match="unknown outer_product_mean 'last'"):
        EvoformerConfig.nano(outer_product_mean="last")
    with pytest.raises(ConfigError, match="msa_heads is 0"):
        EvoformerConfig.nano(msa_heads=0)
