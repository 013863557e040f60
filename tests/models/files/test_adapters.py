"""Adapters: what they change at first and after, the folder that peft reads, merging, and other folders refused."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from polyreme.core import rng
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, ConfigError
from polyreme.models import AutoModelForCausalLM
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.files import adapters
from polyreme.models.files.adapters import LowRank
from polyreme.models.files.folder import weights_digest
from polyreme.nn.layers.lora import LoRA, dense_weight
from polyreme.nn.quant import QuantizedLinear
from tests.models import parity

FOLDERS = parity.FIXTURES / "folders"
LOW_BIT = ("nf4", "int4", "int8")
KINDS = {
    "lora": LoRA(rank=2),
    "rslora": LoRA(rank=3, alpha=4, rslora=True, loraplus_lr_ratio=4),
    "dora": LoRA(rank=2, use_dora=True),
    "pissa": LoRA(rank=2, pissa_init=True),
}
IDS = np.arange(12).reshape(2, 6)


def load(name="llama"):
    return AutoModelForCausalLM.from_pretrained(FOLDERS / name)


def disturb(model):
    """Give what trains other values."""
    rng = np.random.default_rng(0)
    for p in model.parameters():
        if p.trainable:
            p.set_value(p.numpy() + 0.1 * rng.standard_normal(p.shape).astype(np.float32))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", LOW_BIT)
def test_adapters_stand_beside_weights_of_few_bits(kind, tmp_path):
    """The base is the decoded one, in training, from the folder and merged."""
    model, ids = load(), to_tensor(IDS)
    adapters.quantize_maps(model, kind)
    base = model(ids).numpy()
    assert np.abs(load()(ids).numpy() - base).max() > 1e-4
    layers = adapters.add_adapters(model, LoRA(rank=2, use_dora=kind == "nf4"))
    assert all(isinstance(layer.base, QuantizedLinear) for layer in layers.values())
    np.testing.assert_array_equal(model(ids).numpy(), base)
    disturb(model)
    changed = model(ids).numpy()
    (model(ids) * model(ids)).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.trainable)
    adapters.write_adapter(model, tmp_path)
    other = load()
    adapters.apply_adapter(other, adapters.open_adapter(tmp_path))
    sizes = {key: getattr(model.config, key) for key in ("hidden_size", "ffn_size", "num_heads", "num_layers")}
    atol = parity.tolerance(parity.forward_terms(sizes, IDS.shape[1]), changed)
    np.testing.assert_allclose(other(ids).numpy(), changed, rtol=0, atol=atol)
    adapters.merge_adapters(other)
    np.testing.assert_allclose(other(ids).numpy(), changed, rtol=0, atol=atol)
    name = next(iter(layers))
    np.testing.assert_array_equal(
        adapters.rounded(weight_of(load(), name), kind), dense_weight(layers[name].base).numpy()
    )


def weight_of(model, name):
    return dict(model.named_sublayers())[name].weight.numpy()


EXPERTS = [("lora", "mixtral"), ("dora", "qwen3_moe"), ("pissa", "deepseek_v3")]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "llama") for kind in KINDS), ("lora", "gpt2"), ("dora", "gpt2"), *EXPERTS]
)
def test_an_adapter_starts_as_the_base_and_is_the_same_from_its_folder_and_merged(kind, name, tmp_path):
    model, ids = load(name), to_tensor(IDS)
    base = model(ids).numpy()
    layers = adapters.add_adapters(model, KINDS[kind], "all")
    # a length over itself is 1 to the bit where it is computed alike; no other kind computes anything but zeros
    np.testing.assert_array_equal(model(ids).numpy(), base)
    trained = {id(p) for p in model.parameters() if p.trainable}
    assert trained == {id(p) for layer in layers.values() for p in layer.parameters() if p.trainable}
    assert len(trained) == len(layers) * (3 if kind == "dora" else 2)
    disturb(model)
    changed = model(ids).numpy()
    assert np.abs(changed - base).max() > 1e-3

    digest = weights_digest(FOLDERS / name)
    adapters.write_adapter(model, tmp_path, base=str(FOLDERS / name), digest=digest)
    opened, other = adapters.open_adapter(tmp_path), load(name)
    adapters.check_base(opened, digest, "here")
    with pytest.raises(CheckpointError, match="give the weights that it was trained on"):
        adapters.check_base(opened, "0" * 32, "there")
    adapters.apply_adapter(other, opened)
    # sums of up to 2 (width + ranks) terms of a forward, in another order
    config = model.config
    sizes = {key: getattr(config, key) for key in ("hidden_size", "ffn_size", "num_heads", "num_layers")}
    atol = parity.tolerance(parity.forward_terms(sizes, IDS.shape[1]), changed)
    np.testing.assert_allclose(other(ids).numpy(), changed, rtol=0, atol=atol)
    for merging in (model, other):
        adapters.merge_adapters(merging)
        assert not adapters.adapters_of(merging)
        np.testing.assert_allclose(merging(ids).numpy(), changed, rtol=0, atol=atol)
    merging.save_pretrained(tmp_path / "merged")
    assert (
        load_file(tmp_path / "merged" / "model.safetensors").keys()
        == load_file(FOLDERS / name / "model.safetensors").keys()
    )


def test_the_projection_to_the_vocabulary_is_adapted_where_it_is_named(tmp_path):
    model, ids = untied(tmp_path / "base"), to_tensor(IDS)
    base, loss = model(ids).numpy(), float(model(ids, ids))
    assert "head" not in adapters.choose_modules(model)
    layers = adapters.add_adapters(model, LoRA(rank=2), ["lm_head", "q_proj"])
    assert "head" in layers
    np.testing.assert_array_equal(model(ids).numpy(), base)
    assert float(model(ids, ids)) == loss
    model(ids, ids).backward()
    assert float(model.head.lora_b.grad.abs().max()) > 0
    disturb(model)
    changed = model(ids).numpy()
    adapters.write_adapter(model, tmp_path / "adapter")
    assert "base_model.model.lm_head.lora_A.weight" in load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    opened, other = adapters.open_adapter(tmp_path / "adapter"), AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match="adapts the projection to the vocabulary, which rows of a batch share"):
        adapters.place_adapters(other, {"a": opened})
    adapters.apply_adapter(other, opened)
    for merging in (model, other):
        adapters.merge_adapters(merging)
        # sums of up to 2 (width + ranks) terms in another order
        np.testing.assert_allclose(merging(ids).numpy(), changed, rtol=0, atol=1e-4)
    with pytest.raises(ConfigError, match=r"has no linear map 'lm_head'"):
        adapters.add_adapters(load("gpt2"), LoRA(rank=2), "lm_head")


def untied(folder):
    """A LLaMA whose projection is its own, from its folder."""
    rng.seed(2)
    Llama(LlamaConfig.nano(tie_embeddings=False)).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def test_a_folder_is_as_peft_writes_it(tmp_path):
    model = load()
    adapters.add_adapters(model, LoRA(rank=2, dropout=0.1), ["q_proj", "ffn.down"])
    adapters.write_adapter(model, tmp_path)
    arrays = load_file(tmp_path / "adapter_model.safetensors")
    width, ffn = model.config.hidden_size, model.config.ffn_size
    layer = "base_model.model.model.layers.0"
    assert {name: array.shape for name, array in arrays.items() if ".0." in name} == {
        f"{layer}.self_attn.q_proj.lora_A.weight": (2, width),
        f"{layer}.self_attn.q_proj.lora_B.weight": (model.config.num_heads * model.config.head_dim, 2),
        f"{layer}.mlp.down_proj.lora_A.weight": (2, ffn),
        f"{layer}.mlp.down_proj.lora_B.weight": (width, 2),
    }
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "r": 2, "lora_alpha": 4.0, "lora_dropout": 0.1, "use_dora": False}
    assert config.items() >= expected.items()
    assert config["target_modules"] == ["down_proj", "q_proj"]


def test_experts_adapters_that_cannot_be_had_are_refused(tmp_path):
    model = load("mixtral")
    with pytest.raises(ConfigError, match=r"ExpertLoRA: dropout 0\.1 of what A takes"):
        adapters.add_adapters(model, LoRA(rank=2, dropout=0.1), "w1")
    model = load("mixtral")
    adapters.add_adapters(model, LoRA(rank=2), ["w1", "experts.0.w2"])
    assert sorted(adapters.adapters_of(model))[:2] == ["blocks.0.ffn.down", "blocks.0.ffn.gate"]
    adapters.write_adapter(model, tmp_path)
    arrays = load_file(tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="adapts experts, which rows of a batch share"):
        adapters.place_adapters(load("mixtral"), {"a": adapters.open_adapter(tmp_path)})
    for part in ("A", "B"):
        del arrays[f"base_model.model.model.layers.1.block_sparse_moe.experts.2.w1.lora_{part}.weight"]
    save_file(arrays, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"adapts 3 of the 4 experts of blocks\.1\.ffn\.gate; all or none"):
        adapters.apply_adapter(load("mixtral"), adapters.open_adapter(tmp_path))


def test_what_is_no_adapter_of_the_model_is_refused(tmp_path):
    model = load()
    with pytest.raises(ConfigError, match=r"no linear map 'qproj'; did you mean 'q_proj'\?"):
        adapters.add_adapters(model, LoRA(), "qproj")
    with pytest.raises(ConfigError, match="is no less than it has itself"):
        adapters.add_adapters(model, LoRA(rank=1000))
    with pytest.raises(ConfigError, match="has no adapters"):
        adapters.write_adapter(load(), tmp_path)
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        adapters.open_adapter(tmp_path)
    model = load()
    adapters.add_adapters(model, LoRA(rank=2), "q_proj")
    folder = tmp_path / "q"
    adapters.write_adapter(model, folder)
    with pytest.raises(CheckpointError, match=r"is no linear map of a GPT"):
        adapters.apply_adapter(load("gpt2"), adapters.open_adapter(folder))

    def changed(change_weights=None, **config):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        path = copy / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        if change_weights:
            arrays = load_file(copy / "adapter_model.safetensors")
            change_weights(arrays)
            save_file(arrays, copy / "adapter_model.safetensors")
        return copy

    with pytest.raises(ConfigError, match="bias is 'all', which cannot be had here"):
        adapters.open_adapter(changed(bias="all"))
    with pytest.raises(ConfigError, match="peft_type is 'IA3'"):
        adapters.open_adapter(changed(peft_type="IA3"))
    for key, value in {"r": "x", "lora_alpha": float("nan"), "lora_dropout": []}.items():
        with pytest.raises(ConfigError, match=rf"adapter_config\.json: {key} is .*; give a number above 0"):
            adapters.open_adapter(changed(**{key: value}))
    with pytest.raises(CheckpointError, match="has no tensors"):
        adapters.open_adapter(changed(lambda arrays: arrays.clear()))
    with pytest.raises(CheckpointError, match=r"has rank 2, adapter_config\.json says 4"):
        adapters.open_adapter(changed(r=4))
    with pytest.raises(CheckpointError, match="which make no LoRA"):
        adapters.open_adapter(changed(lambda arrays: arrays.pop(next(iter(arrays)))))
    with pytest.raises(CheckpointError, match="is no part of a LoRA"):
        adapters.open_adapter(changed(lambda arrays: arrays.update({"score.weight": np.zeros(2, np.float32)})))


def test_pissa_of_over_half_the_rank_is_written_with_twice_as_much_and_read_back(tmp_path):
    def model():
        rng.seed(0)
        return Llama(LlamaConfig.nano())

    trained, tokens = model(), to_tensor(np.arange(8)[None])
    for layer in adapters.add_adapters(trained, LoRA(rank=12, pissa_init=True)).values():
        layer.lora_b.set_value(layer.lora_b + 0.01)
    adapters.write_adapter(trained, tmp_path)
    read = model()
    adapters.apply_adapter(read, adapters.open_adapter(tmp_path))
    # two products of rank 12 as one of 24: float32 sums of 32 terms in another order, through two layers
    np.testing.assert_allclose(read(tokens).numpy(), trained(tokens).numpy(), rtol=0, atol=8 * 32 * 2.0**-23)


def test_parts_of_one_map_share_an_adapter(tmp_path):
    """Of a Phi-3 one name stands for queries, keys and values: an adapter of it is read, none is written."""
    model, rng = load("phi3"), np.random.default_rng(0)
    for target in ("all", "qkv_proj", ["q"], ["down_proj", "gate"]):
        with pytest.raises(ConfigError, match=r"lora_target: .*(qkv|gate_up)_proj.* stands for several maps .*o_proj"):
            adapters.choose_modules(model, target)
    assert len(adapters.choose_modules(model, ["o_proj", "down_proj"])) == 4
    name = "model.layers.1.self_attn.qkv_proj"
    product = LowRank(*(rng.standard_normal(size).astype(np.float32) for size in ((24, 2), (2, 48))), 0.5, None)
    adapter = adapters.Adapter(tmp_path, LoRA(rank=2), {name: product}, "", None, "")
    parts = adapters.products_by_name(adapter, model)
    assert sorted(parts) == [f"blocks.1.attention.{part}" for part in "kqv"]
    np.testing.assert_array_equal(np.concatenate([parts[f"blocks.1.attention.{p}"].b for p in "qkv"], 1), product.b)
    assert all((part.a == product.a).all() for part in parts.values())
