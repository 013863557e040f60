"""Experts in few bits: rounded by the tokens that come to them, written, read, written by, and laid over devices."""

import jax
import numpy as np
import pytest

from polyreme.compression.calibration import ExpertInputs
from polyreme.compression.quantize import QuantizationOptions, quantize_decoder
from polyreme.core import rng
from polyreme.distributed.placement import clear_plan
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.generation import SamplingParams, TextEngine
from polyreme.mesh import Plan
from polyreme.models import AutoModelForCausalLM
from polyreme.models.experts.deepseek_v3 import DeepseekV3, DeepseekV3Config
from polyreme.models.experts.mixtral import Mixtral, MixtralConfig
from polyreme.models.files import adapters
from polyreme.nn.layers.lora import LoRA
from polyreme.nn.quant import QuantizedExperts

ROWS = [np.random.default_rng(seed).integers(0, 128, (4, 16)) for seed in range(3)]


def mixtral():
    rng.seed(3)
    model = Mixtral(MixtralConfig.nano(num_experts=6, head_dim=8, num_kv_heads=4))
    model.eval()
    return model


def logits(model, ids=ROWS[0]):
    with no_grad():
        return model(to_tensor(ids)).numpy()


@pytest.fixture
def _one_device_afterwards():
    yield
    clear_plan()


def test_experts_are_calibrated_by_their_own_tokens():
    moe = mixtral().blocks[0].ffn
    x, choices = np.random.default_rng(0).standard_normal((1, 5, 32), np.float32), np.array([[[0, 2], [2, -1], [0, 5]]])
    inputs = ExpertInputs(moe)
    with inputs.watching(), no_grad():
        moe.mix(to_tensor(x[:, :3]), to_tensor(choices.astype("int32")), to_tensor(np.ones((1, 3, 2), np.float32)))
    counts = [statistics.count for statistics in inputs.statistics["up"]]
    assert counts == [2, 0, 2, 0, 0, 1]
    np.testing.assert_allclose(inputs.statistics["gate"][2].gram, x[0, :2].T @ x[0, :2], rtol=1e-5, atol=1e-5)
    gate, up = (x[0, 2] @ matrix.numpy()[5] for matrix in (moe.gate, moe.up))
    hidden = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(inputs.statistics["down"][5].absmax, np.abs(hidden), rtol=1e-4)


def test_gptq_errs_less_and_the_folder_comes_back_to_the_bit(tmp_path):
    errors = {}
    for method in ("rtn", "gptq"):
        model = mixtral()
        options = QuantizationOptions(method, "wint4", group_size=8)
        errors[method] = {e.name: e.error for e in quantize_decoder(model, options, ROWS)}
    experts = [name for name in errors["rtn"] if ".ffn." in name]
    assert len(experts) == 6
    assert all(errors["gptq"][name] < errors["rtn"][name] for name in experts)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    np.testing.assert_array_equal(logits(again), logits(model))
    layers = [layer for layer in again.sublayers() if isinstance(layer, QuantizedExperts)]
    numbers = sum(p.size for block in mixtral().blocks for p in block.ffn.matrices().values())
    # half a byte, and a scale of four bytes for eight of them
    assert sum(layer.codes.size + 4 * layer.codes_scale.size for layer in layers) == numbers


@pytest.mark.usefixtures("_one_device_afterwards")
def test_few_tokens_and_plans_give_what_all_experts_do(tmp_path):
    """A single token decodes its own experts alone; a plan lays codes over devices."""
    model = mixtral()
    quantize_decoder(model, QuantizationOptions(type="wint8"), ROWS)
    want = logits(model)
    bound = 200 * np.finfo(np.float32).eps * np.abs(want).max()
    np.testing.assert_allclose(logits(model, ROWS[0][:1, :1])[0, 0], want[0, 0], rtol=0, atol=bound)
    engine = TextEngine(model, max_num_seqs=2, block_size=4, prefill_chunk=4)
    engine.add("a", ROWS[0][0, :6].tolist(), SamplingParams(temperature=0, max_tokens=2))
    tokens = [token for _ in range(3) for out in engine.step() for token in out.token_ids]
    assert tokens[0] == logits(model, ROWS[0][:1, :6])[0, -1].argmax()
    model.save_pretrained(tmp_path)
    plan = Plan.from_degrees(ep=2, mp=2)
    placed = AutoModelForCausalLM.from_pretrained(tmp_path, plan=plan, devices=jax.devices()[:4])
    codes = placed.blocks[0].ffn.up.codes
    assert codes._array.addressable_shards[0].data.size < codes.size
    np.testing.assert_allclose(logits(placed), want, rtol=0, atol=bound)


def test_adapters_stand_beside_experts_in_few_bits(tmp_path):
    """They train, are read again, and are merged into the decoded matrices."""
    model = mixtral()
    quantize_decoder(model, QuantizationOptions(type="wint8"), ROWS[:1])
    model.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = logits(model)
    adapters.add_adapters(model, LoRA(rank=2), ["ffn.up", "ffn.down"])
    np.testing.assert_array_equal(logits(model), before)
    model(to_tensor(ROWS[0]), to_tensor(ROWS[1])).backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained
    assert all(name.endswith(("lora_a", "lora_b")) for name in trained)
    for p in model.parameters():
        if p.trainable:
            p.set_value(p.numpy() + 0.05)
    want = logits(model)
    adapters.write_adapter(model, tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapters.apply_adapter(again, adapters.open_adapter(tmp_path / "adapter"))
    np.testing.assert_array_equal(logits(again), want)
    adapters.merge_adapters(again)
    assert sum(isinstance(layer, QuantizedExperts) for layer in again.sublayers()) == 2  # the gates, which had none
    np.testing.assert_allclose(logits(again), want, rtol=0, atol=200 * np.finfo(np.float32).eps * np.abs(want).max())


@pytest.mark.slow
def test_dense_blocks_stand_beside_experts(tmp_path):
    """Whose feed-forward has the names that experts' maps have."""
    rng.seed(3)
    model = DeepseekV3(DeepseekV3Config.nano(num_experts=4, n_shared_experts=1))
    model.eval()
    quantize_decoder(model, QuantizationOptions(type="wfp8", method="fp8"), ROWS)
    model.save_pretrained(tmp_path)
    np.testing.assert_array_equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))
    kept = mixtral()
    quantize_decoder(kept, QuantizationOptions(type="a8w8"), ROWS)
    assert not kept.blocks[0].ffn.is_quantized
