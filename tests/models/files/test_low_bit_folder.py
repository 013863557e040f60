"""Folders of weights in few bits: written and read back to the bit in either layout, and what they hold."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import polyreme as paddle
from polyreme.errors import CheckpointError, ConfigError, ShapeError
from polyreme.io import safetensors_file
from polyreme.kernels.low_bit import NF4, decode, encode
from polyreme.mesh import Plan
from polyreme.models.auto import AutoModelForCausalLM
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.files.low_bit_folder import LowBitLayout, linear_maps, low_bit_layers, read_layout, replace_layer
from polyreme.nn.quant import QuantizedLinear, weight_dequantize
from tests.models import parity
from tests.models.parity import FIXTURES

TOKENS = np.arange(8)[None]
# what a few weights of a checkpoint must weigh against those in float32: a byte and scales, half of one and scales
KINDS = {
    "int8": ("int8", -1, False),
    "nf4": ("nf4", 64, False),
    "int4": ("int4", 8, False),
    "a8w8": ("int8", -1, True),
    "fp8": ("fp8", -1, True),
}


def low_bit(model, kind, group, low_bit_input=False, method="compressed-tensors"):
    for name, layer in linear_maps(model).items():
        replace_layer(model, name, QuantizedLinear.of(layer, kind, group, low_bit_input))
        if method == "gptq":
            layer = low_bit_layers(model)[name]
            layer.set_codes(layer.weight, layer.weight_scale.astype("float16").astype("float32"))
    model.low_bit_layout = LowBitLayout(method, kind, group, low_bit_input)
    return model


def logits(model):
    model.eval()
    with paddle.no_grad():
        return model(paddle.to_tensor(TOKENS)).numpy()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *(("compressed-tensors", kind) for kind in KINDS if kind != "nf4"),
        *(("gptq", "int8"), ("gptq", "int4"), ("bitsandbytes", "nf4")),
    ],
)
def test_a_folder_comes_back_to_the_bit(tmp_path, method, kind):
    paddle.seed(0)
    model = low_bit(Llama(LlamaConfig.nano(hidden_size=64)), *KINDS[kind], method)
    model.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert back.low_bit_layout.weight_dtype == KINDS[kind][0]
    np.testing.assert_array_equal(logits(back), logits(model))
    back.save_pretrained(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.slow_cases("scales")
@pytest.mark.parametrize("scales", ["scales", "nested_scales"])
def test_nf4_is_read_as_bitsandbytes_reads_it(scales):
    """Recorded: a weight [8, 128], its parts, and what bitsandbytes makes of them."""
    arrays = load_file(FIXTURES / f"nf4_{scales}.safetensors")
    layout = LowBitLayout("bitsandbytes", "nf4", 64)
    codes, spread = layout.open("m", {f"m.{name}": array.view(parity.Whole) for name, array in arrays.items()})
    whole = (slice(None), slice(None))
    values = np.array(NF4, np.float32)[codes.read(whole)] * np.repeat(spread.read(whole), 64, 1)
    np.testing.assert_array_equal(values, arrays["decoded"])
    np.testing.assert_array_equal(codes.read((slice(3, 7), slice(64, 80))), codes.read(whole)[3:7, 64:80])
    own = encode(arrays["full"].T, "nf4", 64)
    if scales == "scales":
        np.testing.assert_array_equal(decode(*own, "nf4", 64, "float32"), arrays["decoded"])
        for name, array in layout.pack(codes.read(whole), spread.read(whole)).items():
            np.testing.assert_array_equal(array, arrays[name])


@pytest.mark.parametrize("key", ["nested_blocksize", "nested_offset"])
def test_scales_of_8_bits_without_their_meaning_are_refused(key):
    arrays = load_file(FIXTURES / "nf4_nested_scales.safetensors")
    (name,) = (part for part in arrays if "quant_state" in part)
    state = json.loads(arrays[name].tobytes())
    del state[key]
    arrays[name] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    with pytest.raises(CheckpointError, match=f"scales of 8 bits without {key}, which say"):
        LowBitLayout("bitsandbytes", "nf4", 64).open("m", {f"m.{n}": a.view(parity.Whole) for n, a in arrays.items()})


def test_another_layout_is_refused():
    with pytest.raises(ConfigError, match="method 'awq' of weights of few bits; one of compressed-tensors, gptq"):
        LowBitLayout("awq", "int4", 128)


def test_nf4_that_is_not_read_is_refused(tmp_path):
    paddle.seed(0)
    model = low_bit(Llama(LlamaConfig.nano(hidden_size=64)), "nf4", 32, method="bitsandbytes")
    with pytest.raises(ShapeError, match=r"bitsandbytes: a weight from 64 to .* groups of 64 inputs"):
        model.save_pretrained(tmp_path / "groups")
    model = low_bit(Llama(LlamaConfig.nano(hidden_size=64)), *KINDS["nf4"], method="bitsandbytes")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change in ({"bnb_4bit_quant_type": "fp4"}, {"load_in_4bit": False}, {"bnb_4bit_quant_storage": "bfloat16"}):
        changed = config | {"quantization_config": config["quantization_config"] | change}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match="nf4 stored in uint8 is read"):
            AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    arrays = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    damages = {
        name: (arrays[name][:-1], "numbers of 4 bits are uint8"),
        f"{name}.absmax": (arrays[f"{name}.absmax"] * np.nan, "NaN or infinity among the scales"),
        f"{name}.quant_map": (arrays[f"{name}.quant_map"] * 2, "nf4 in blocks of 64, which divide the inputs"),
        f"{name}.quant_state.bitsandbytes__nf4": (np.zeros(9, np.uint8), "where the form of the weight is told"),
    }
    for part, (array, message) in damages.items():
        save_file(arrays | {part: np.ascontiguousarray(array)}, tmp_path / "model.safetensors")
        with pytest.raises((CheckpointError, ConfigError), match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path)


def test_parts_lie_as_the_layouts_say(tmp_path):
    """Each number of a weight is found again by the formats' own arithmetic."""
    paddle.seed(0)
    for method in ("compressed-tensors", "gptq"):
        model = low_bit(Llama(LlamaConfig.nano()), "int4", 8, method=method)
        model.save_pretrained(tmp_path / method)
        layer = model.blocks[1].ffn.down
        want = weight_dequantize(layer.weight, layer.weight_scale, "int4", "float32", 8).numpy()
        file = safetensors_file.Slices(tmp_path / method / "model.safetensors")
        parts = {
            name.rpartition(".")[2]: file.read(name, (slice(None),) * len(entry.shape))
            for name, entry in file.entries.items()
            if name.startswith("model.layers.1.mlp.down_proj.")
        }
        inputs, outputs = want.shape
        got = np.zeros_like(want)
        for i in range(0, inputs, 7):
            for j in range(outputs):
                if method == "gptq":
                    number = (int(parts["qweight"][i // 8, j]) >> 4 * (i % 8)) & 15
                    zero = ((int(parts["qzeros"][i // 8, j // 8]) >> 4 * (j % 8)) & 15) + 1
                    got[i, j] = (number - zero) * parts["scales"][parts["g_idx"][i], j].astype("float32")
                else:
                    number = (int(parts["weight_packed"][j, i // 8]) >> 4 * (i % 8)) & 15
                    got[i, j] = (number - 8) * parts["weight_scale"][j, i // 8]
        np.testing.assert_array_equal(got[::7], want[::7])
        if method == "compressed-tensors":
            assert parts["weight_shape"].tolist() == [outputs, inputs]
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"]
    assert {key: config[key] for key in ("quant_method", "bits", "group_size", "sym", "desc_act")} == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 8,
        "sym": True,
        "desc_act": False,
    }


def test_gpt_lies_in_few_bits_too_and_skips_what_is_left(tmp_path):
    paddle.seed(0)
    model = GPT(GPTConfig.nano())
    kept = model.blocks[0].ffn.up
    low_bit(model, "int4", 16)
    replace_layer(model, "blocks.0.ffn.up", kept)
    model.save_pretrained(tmp_path)
    ignored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["lm_head", "transformer.h.0.mlp.c_fc"]
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    np.testing.assert_array_equal(logits(back), logits(model))
    assert type(back.blocks[0].ffn.up).__name__ == "Linear"


@pytest.mark.slow
def test_each_device_reads_its_part(tmp_path):
    paddle.seed(0)
    model = low_bit(Llama(LlamaConfig.nano()), "int4", 8)
    model.save_pretrained(tmp_path)
    alone = logits(model)
    split = AutoModelForCausalLM.from_pretrained(tmp_path, plan=Plan.from_degrees(mp=2), devices=jax.devices()[:2])
    q = split.blocks[0].attention.q
    assert [t._array.addressable_shards[0].data.shape for t in (q.weight, q.weight_scale)] == [(8, 32), (4, 16)]
    np.testing.assert_allclose(logits(split), alone, rtol=1e-5, atol=1e-5)


def rewrite(folder, change):
    """The tensors of a folder, changed."""
    file = folder / "model.safetensors"
    slices = safetensors_file.Slices(file)
    arrays = {name: slices.read(name, (slice(None),) * len(e.shape)) for name, e in slices.entries.items()}
    change(arrays)
    with open(file, "wb") as out:
        safetensors_file.write(out, arrays, {"format": "pt"})


def test_gptq_with_zero_points_of_its_own_becomes_int8(tmp_path):
    paddle.seed(0)
    model = low_bit(Llama(LlamaConfig.nano()), "int4", 8, method="gptq")
    model.save_pretrained(tmp_path)
    name = "model.layers.0.mlp.down_proj"

    def shift(arrays):
        # 5 in every place: what is read is one more
        arrays[f"{name}.qzeros"] = np.full_like(arrays[f"{name}.qzeros"], 0x55555555)

    rewrite(tmp_path, shift)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["sym"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer, old = AutoModelForCausalLM.from_pretrained(tmp_path).blocks[0].ffn.down, model.blocks[0].ffn.down
    assert layer.weight_dtype == "int8"
    values = [weight_dequantize(one.weight, one.weight_scale, one.weight_dtype, "float32", 8) for one in (layer, old)]
    # codes count from 6 where they did from 8
    want = values[1] + 2 * old.weight_scale.repeat_interleave(8, 0)
    np.testing.assert_allclose(values[0], want, rtol=1e-6, atol=1e-7)
    rewrite(tmp_path, lambda arrays: arrays.update({f"{name}.g_idx": arrays[f"{name}.g_idx"][::-1].copy()}))
    with pytest.raises(ConfigError, match="groups are of inputs that are not in a row"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="nf4 cannot be written"):
        LowBitLayout("gptq", "nf4")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits"),
        ([], r"quantization_config: \[\], which is no object"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "group_size 'x'; it is a number of inputs"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "0 config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, r"config_groups: \[1\], which is no object"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 1}}, "config_groups: 1, which is no object"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": []}}}},
            "symmetric int4",
        ),
    ],
)
def test_other_layouts_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        read_layout(config)


def test_a_part_that_is_missing_is_named(tmp_path):
    model = low_bit(Llama(LlamaConfig.nano()), "int8", -1)
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda arrays: arrays.pop("model.layers.0.mlp.up_proj.weight_scale"))
    with pytest.raises(CheckpointError, match=r"up_proj: has no weight_scale, which compressed-tensors stores"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("method", "part", "change", "message"),
    [
        ("gptq", "qweight", lambda a: a[:1], "do not fit together"),
        ("gptq", "qweight", lambda a: a.astype(np.float32), r"qweight: float32 .*; int32 in 2 dims"),
        ("gptq", "qzeros", lambda a: a[0], r"qzeros: int32 .*; int32 in 2 dims"),
        ("gptq", "qzeros", lambda a: a * 0, "which int4 does not hold"),
        ("gptq", "scales", lambda a: a[:0], "do not fit together"),
        ("gptq", "scales", lambda a: a.astype(np.int32), "floating numbers in 2 dims"),
        ("gptq", "g_idx", lambda a: a[:3], "do not fit together"),
        ("gptq", "scales", lambda a: a * np.float16(np.nan), "scales: NaN or infinity among the scales"),
        (
            "compressed-tensors",
            "weight_scale",
            lambda a: a * np.float32(np.inf),
            "weight_scale: NaN or infinity among the scales",
        ),
        ("compressed-tensors", "weight_shape", lambda a: a[:0], "weight_shape says"),
        ("compressed-tensors", "weight_packed", lambda a: a[:3], "weight_shape says"),
        ("compressed-tensors", "weight_scale", lambda a: a[0], "floating numbers in 2 dims"),
    ],
)
def test_parts_that_do_not_fit_together_are_named(tmp_path, method, part, change, message):
    model = low_bit(Llama(LlamaConfig.nano()), "int4", 8, method=method)
    model.save_pretrained(tmp_path)
    name = f"model.layers.0.mlp.up_proj.{part}"
    rewrite(tmp_path, lambda arrays: arrays.update({name: change(arrays[name])}))
    with pytest.raises(CheckpointError, match=rf"up_proj.*{message}"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
