"""What published methods promise, on a small trained model: which loses less than which."""

import numpy as np
import pytest

from polyreme.compression import (
    PruningOptions,
    QuantizationOptions,
    Sparsity,
    nats_per_token,
    prune_decoder,
    quantize_decoder,
)
from polyreme.compression.calibration import collect, maps_of, walk_blocks
from polyreme.compression.rounding import absmax_scales, clipped_scales, gptq, round_nearest
from polyreme.compression.scaling import apply_factors, awq_factors, scaled_inputs
from polyreme.incubate.asp.masks import check_mask_1d
from tests.compression.trained import CALIBRATION, EVALUATION, divergence, trained

GROUP = 32


def rounded(method, bits, group=GROUP):
    """The trained model with weights of so many bits, in full numbers."""
    model = trained()

    def change(name, block, run):
        maps = maps_of(model, name)
        statistics = collect(block, run, maps)
        if method == "awq":
            for scaled in scaled_inputs(name, block):
                apply_factors(scaled, awq_factors(scaled, statistics, bits, group), statistics)
        for n, layer in maps.items():
            weight = layer.weight.numpy()
            if method.startswith("gptq"):
                left = gptq(weight, statistics[n], bits, group, act_order=method.endswith("order"))
            elif method == "awq":
                left = round_nearest(weight, clipped_scales(weight, statistics[n], bits, group), bits)
            else:
                left = round_nearest(weight, absmax_scales(weight, bits, group), bits)
            layer.weight.set_value(left.values().astype("float32"))

    walk_blocks(model, CALIBRATION, change)
    return divergence(model)


def test_the_model_has_learnt_something():
    # bytes drawn by how often each is seen cost 3 nats
    assert nats_per_token(trained(), EVALUATION) < 2.2


@pytest.mark.parametrize("bits", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_gptq_and_awq_lose_less_than_rounding_to_the_nearest(bits):
    nearest = rounded("rtn", bits)
    for method in ("gptq", "gptq-order", "awq"):
        assert rounded(method, bits) < 0.9 * nearest, method


@pytest.mark.slow
def test_smaller_groups_lose_less():
    losses = [rounded("rtn", 3, group) for group in (-1, 32, 8)]
    assert losses == sorted(losses, reverse=True)


def quantized(**options):
    model = trained()
    errors = quantize_decoder(model, QuantizationOptions(**options), CALIBRATION)
    assert len(errors) == 14
    return divergence(model)


@pytest.mark.slow
def test_few_bits_as_they_are_stored_lose_what_the_rounding_does():
    stored = quantized(method="gptq", type="wint4", group_size=GROUP)
    # scales are rounded to float16 beside
    assert stored == pytest.approx(rounded("gptq", 4), rel=0.1)
    assert quantized(method="rtn", type="wint8") < 0.001
    assert quantized(method="fp8", type="wfp8") < 0.01
    assert quantized(method="awq", type="wint4", group_size=GROUP) < quantized(type="wint4", group_size=GROUP)


def planted(model):
    """A few inputs of each norm's maps made 60 times as large, and their weights as much smaller: the same function."""
    factors = np.ones(64, "float32")
    factors[[3, 17, 40]] = 1 / 60
    for block in model.blocks:
        for norm, part, names in (
            (block.attention_norm, block.attention, "qkv"),
            (block.ffn_norm, block.ffn, ("gate", "up")),
        ):
            norm.weight.set_value(norm.weight.numpy() / factors)
            for n in names:
                layer = getattr(part, n)
                layer.weight.set_value(layer.weight.numpy() * factors[:, None])
    return model


def test_smoothing_loses_less_than_plain_int8_with_outliers():
    losses = {}
    for method in ("rtn", "smooth"):
        model = planted(trained())
        assert divergence(model) < 1e-6
        quantize_decoder(model, QuantizationOptions(method=method, type="a8w8"), CALIBRATION)
        losses[method] = divergence(model)
    assert losses["smooth"] < 0.5 * losses["rtn"]


@pytest.mark.parametrize("sparsity", [pytest.param("0.5", marks=pytest.mark.slow), "2:4"])
def test_wanda_and_sparsegpt_lose_less_than_magnitude(sparsity):
    losses = {}
    for method in ("magnitude", "wanda", "sparsegpt"):
        model = trained()
        prune_decoder(model, PruningOptions(method, Sparsity.parse(sparsity)), CALIBRATION)
        weight = model.blocks[1].ffn.gate.weight.numpy()
        assert (weight == 0).mean() == pytest.approx(0.5, abs=0.01)
        assert sparsity == "0.5" or check_mask_1d(weight.T, 2, 4)
        losses[method] = divergence(model)
    assert losses["wanda"] < losses["magnitude"]
    assert losses["sparsegpt"] < losses["wanda"]
