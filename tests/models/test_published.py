"""Published weights: transformers' folders of every family, their logits, back to the same files, plans, refusals."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from polyreme.distributed.placement import clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, ConfigError, ShapeError
from polyreme.mesh import Plan
from polyreme.models import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.decoders.qwen2 import Qwen2
from polyreme.models.files.published import read_config
from polyreme.models.parts.cache import KVCache, PagedCache
from polyreme.models.parts.rotary import LongRope, Yarn, read_scaling
from polyreme.models.pretrained import open_published
from tests.models import parity

FOLDERS = parity.FIXTURES / "folders"
every_folder = pytest.mark.parametrize("name", sorted(folder.name for folder in FOLDERS.iterdir()))


@pytest.fixture
def _one_device_afterwards():
    yield
    clear_plan()


@pytest.fixture
def copied(tmp_path):
    """A copy of the LLaMA's folder, to be changed."""
    return Path(shutil.copytree(FOLDERS / "llama", tmp_path / "llama"))


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def logits_and_recorded(model, name):
    """The model's logits, transformers', and how far they may lie apart."""
    recorded, config = load_file(FOLDERS / name / "recorded.safetensors"), model.config
    sizes = {key: getattr(config, key) for key in ("hidden_size", "num_layers")}
    sizes |= {"num_heads": getattr(config, "num_heads", 1), "ffn_size": getattr(config, "ffn_size", 0)}
    sizes["ffn_size"] = sizes["ffn_size"] or config.inner_size  # of a state space
    terms = parity.forward_terms(sizes, recorded["ids"].shape[1])
    return model(to_tensor(recorded["ids"])).numpy(), recorded["logits"], parity.tolerance(terms, recorded["logits"])


@pytest.mark.slow_cases("arcee", "seed_oss", "nemotron", "deepseek_v2")
@every_folder
def test_a_folder_gives_transformers_logits_and_is_written_as_it_was(name, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(FOLDERS / name)
    got, want, atol = logits_and_recorded(model, name)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    assert not model.training

    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    written = {key: load_file(tmp_path / file)[key] for key, file in index.items()}
    published = load_file(FOLDERS / name / "model.safetensors")
    assert written.keys() == published.keys()
    for key, array in published.items():
        np.testing.assert_array_equal(written[key], array, err_msg=key)
    assert AutoConfig.from_pretrained(tmp_path) == model.config


@pytest.mark.slow_cases("falcon_alibi", "qwen2_moe", "gptj", "exaone4", "glm4_moe", "nemotron")
@pytest.mark.parametrize(
    "name",
    [
        *("falcon", "falcon_alibi", "gptj", "opt_sums", "qwen2_moe", "cohere2", "gpt_oss", "mamba", "mamba2"),
        *("olmo3", "exaone4", "glm4_moe", "nemotron"),
    ],
)
def test_a_text_that_is_continued_over_a_cache_has_the_same_logits(name):
    """In rows of their own and in blocks: an empty cache, then tokens that follow others."""
    model = AutoModelForCausalLM.from_pretrained(FOLDERS / name)
    want, recorded, atol = logits_and_recorded(model, name)
    tokens = to_tensor(load_file(FOLDERS / name / "recorded.safetensors")["ids"])
    paged = PagedCache(model, num_blocks=8, block_size=4, num_slots=2).rows(2, 16)
    paged.block_tables.set_value(np.array([[5, 0, 7, 2], [1, 6, 3, 4]], np.int32))
    paged.slots.set_value(np.array([1, 0], np.int32))
    for cache in (KVCache(model, 2, 16), paged):
        parts = [model.project(model.extend(tokens[:, :7], cache))]
        cache.is_empty = False
        parts.append(model.project(model.extend(tokens[:, 7:], cache)))
        got = np.concatenate([part.numpy() for part in parts], 1)
        np.testing.assert_allclose(got, recorded, rtol=0, atol=atol)
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.mark.slow_cases(
    *("llama_tied_biases", "qwen3_moe", "gpt2", "bloom", "falcon", "falcon_grouped", "opt_sums", "phi", "olmo"),
    *("glm4_moe", "nemotron"),
)
@pytest.mark.usefixtures("_one_device_afterwards")
@pytest.mark.parametrize(
    "name",
    [
        "llama_tied_biases",
        "qwen3_moe",
        "gpt_oss",
        "olmo",
        "gpt2",
        "bloom",
        "falcon",
        "falcon_grouped",
        "opt_sums",
        "phi",
        "glm4_moe",
        "nemotron",
    ],
)
def test_a_plan_gets_its_parts_of_each_weight(name):
    """As one device has them, a part of a split weight on each device."""
    plan = Plan.from_degrees(mp=2, sharding=2, sharding_stage=3)
    model = AutoModelForCausalLM.from_pretrained(FOLDERS / name, plan=plan, devices=jax.devices()[:4])
    split = [p for p in model.parameters() if p._array.addressable_shards[0].data.size < p.size]
    assert len(split) > len(model.parameters()) / 2
    got, want, atol = logits_and_recorded(model, name)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def test_dtypes_and_changes():
    model = Llama.from_pretrained(FOLDERS / "llama", dtype="bfloat16", seq_len=16)
    assert {p.dtype.name for p in model.parameters()} == {"bfloat16"}
    assert model.config.seq_len == 16
    assert AutoModelForCausalLM.from_pretrained(FOLDERS / "llama", dtype="auto").norm.weight.dtype.name == "float32"


def test_words_of_transformers_and_of_paddlenlp():
    words = {"torch_dtype": "bfloat16", "device_map": "auto", "low_cpu_mem_usage": True, "trust_remote_code": True}
    words |= {"attn_implementation": "sdpa", "convert_from_hf": True, "tensor_parallel_degree": 1, "use_cache": False}
    model = AutoModelForCausalLM.from_pretrained(FOLDERS / "llama", **words, max_position_embeddings=16)
    assert (model.config.seq_len, model.norm.weight.dtype.name) == (16, "bfloat16")
    assert model.generation_config == {"bos_token_id": 0, "eos_token_id": 1}
    config = AutoConfig.from_pretrained(FOLDERS / "llama", max_position_embeddings=8)
    assert AutoModelForCausalLM.from_pretrained(FOLDERS / "llama", config=config).config.seq_len == 8
    assert isinstance(AutoModelForCausalLM.from_config(config), Llama)
    with pytest.raises(ConfigError, match="no family here has a LlamaConfig for seq2seq_lm"):
        AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(ConfigError, match="config is a LlamaConfig, and the weights are of a Qwen2Config"):
        AutoModelForCausalLM.from_pretrained(FOLDERS / "qwen2", config=config)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"device_map": "cuda:0"}, "device_map='cuda:0' cannot be had here; give plan="),
        ({"load_in_4bit": True}, "load_in_4bit=True cannot be had here; round the folder with polyreme quantize"),
        ({"use_safetensors": False}, "use_safetensors=False cannot be had here; files that can run code"),
        ({"torch_dtype": "float32", "dtype": "bfloat16"}, "torch_dtype='float32', and dtype says otherwise"),
        ({"max_position": 3}, "LlamaConfig has no 'max_position'"),
    ],
)
def test_words_that_ask_for_what_is_not_done(words, message):
    with pytest.raises(ConfigError, match=message):
        AutoModelForCausalLM.from_pretrained(FOLDERS / "llama", **words)


@pytest.mark.parametrize(("name", "empty"), [("gpt2", [3, 9, 15, 16]), ("gemma3", [0, 14, 15, 16])])
def test_rows_that_are_padded_have_the_logits_of_their_tokens(name, empty):
    """On the left, on the right, and between, where there are no windows: positions are counted without the padding."""
    model = AutoModelForCausalLM.from_pretrained(FOLDERS / name)
    _, want, atol = logits_and_recorded(model, name)
    ids = load_file(FOLDERS / name / "recorded.safetensors")["ids"]
    mask = np.ones((2, 17), np.int64)
    mask[0, :4] = mask[1, empty] = 0
    rows = np.zeros_like(mask)
    rows[mask == 1] = ids.flatten()
    got = model(input_ids=to_tensor(rows), attention_mask=to_tensor(mask)).numpy()[mask == 1]
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=0, atol=atol)
    with pytest.raises(ShapeError, match=r"attention_mask has shape \[2, 3\]; give that of the ids"):
        model(to_tensor(rows), attention_mask=to_tensor(mask[:, :3]))


def test_a_family_without_documents_is_padded_behind_alone():
    model = AutoModelForCausalLM.from_pretrained(FOLDERS / "bloom")
    ids = to_tensor(np.arange(6)[None])
    masked = model(ids, attention_mask=to_tensor(np.array([[1, 1, 1, 1, 0, 0]])))
    assert masked.numpy()[:, :4].tolist() == model(ids).numpy()[:, :4].tolist()
    with pytest.raises(ConfigError, match="bloom reads rows from their first place on"):
        model(ids, attention_mask=to_tensor(np.array([[0, 1, 1, 1, 1, 1]])))


def test_newer_and_older_spellings(copied):
    """Rotary positions as transformers 5 writes them; buffers that old versions stored; a model without its head."""
    want = AutoConfig.from_pretrained(FOLDERS / "llama_llama3")
    given = json.loads((FOLDERS / "llama_llama3" / "config.json").read_text())
    given["rope_parameters"] = given.pop("rope_scaling") | {"rope_theta": given.pop("rope_theta")}
    (copied / "config.json").write_text(json.dumps(given))
    assert AutoConfig.from_pretrained(copied) == want

    tied = FOLDERS / "llama_tied_biases"
    old = {key.removeprefix("model."): array for key, array in load_file(tied / "model.safetensors").items()}
    old["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    shutil.copy(tied / "config.json", copied)
    save_file(old, copied / "model.safetensors")
    change_config(copied, architectures=["LlamaModel"])
    model = AutoModelForCausalLM.from_pretrained(copied)
    got, want, atol = logits_and_recorded(model, tied.name)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("llama", {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}),
        ("mistral", {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "sliding_window": 4096}),
        ("gemma", {"rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_activation": None}),
        ("gemma2", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256}),
        ("gemma3", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
        ("granite", {"embedding_multiplier": 1.0, "attention_multiplier": 1.0, "logits_scaling": 1.0}),
        ("mixtral", {"rope_theta": 1000000.0, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2}),
        ("qwen2", {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}),
        ("qwen3", {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "head_dim": 128}),
        ("qwen3_moe", {"rope_theta": 10000.0, "num_experts_per_tok": 8, "norm_topk_prob": False}),
        ("deepseek_v3", {"routed_scaling_factor": 2.5, "norm_topk_prob": True, "rope_theta": 10000.0}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 5632, "moe_intermediate_size": 1408, "qkv_bias": True}),
        ("bloom", {"seq_length": 2048, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}),
        ("falcon", {"multi_query": True, "parallel_attn": True, "alibi": False, "ffn_hidden_size": 96, "bias": False}),
        ("phi", {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "hidden_act": "gelu_new"}),
        ("gptj", {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 2048}),
        ("opt", {"do_layer_norm_before": True, "activation_function": "relu", "word_embed_proj_dim": 24}),
    ],
)
def test_a_key_that_is_left_out_means_what_transformers_means_by_it(name, meant):
    """No weight's shape would tell. Values of transformers 4.57.6."""
    opened = open_published(FOLDERS / name, needs_weights=False)
    more = {"num_experts": 32} if name == "qwen3_moe" else {}
    said = {key: value for key, value in (opened.config | more).items() if key not in meant}
    said |= {"num_key_value_heads": 2} if "num_key_value_heads" in opened.config else {}
    fields = opened.family.config.load()(**read_config(opened.published, said))
    told = opened.family.config.load()(**read_config(opened.published, said | meant))
    assert fields == told


@pytest.mark.parametrize(
    ("name", "changes", "same"),
    [
        # transformers 5 says the number by two names, and names modules that it leaves out of the files
        ("qwen3_moe", {"num_local_experts": 4}, True),
        ("deepseek_v3", {"num_nextn_predict_layers": 1}, True),
        # the scaling begins past the positions that there are
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, True),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, True),
        # transformers 5 says rotary positions by the kind of block
        (
            "gemma3",
            {
                "rope_theta": None,
                "rope_local_base_freq": None,
                "rope_scaling": None,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            },
            True,
        ),
        (
            "phi",
            {
                "rope_theta": None,
                "partial_rotary_factor": None,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.67},
            },
            True,
        ),
        ("falcon", {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, True),
        ("falcon", {"alibi": True}, False),
        ("gemma2", {"attn_logit_softcapping": None}, False),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}, False),
    ],
)
def test_other_spellings_of_a_model(name, changes, same, tmp_path):
    """They say the same function, or another one, which is written as it was read."""
    shutil.copytree(FOLDERS / name, tmp_path / "other")
    change_config(tmp_path / "other", **changes)
    config = AutoConfig.from_pretrained(tmp_path / "other")
    if same and "rope_scaling" not in changes:
        assert config == AutoConfig.from_pretrained(FOLDERS / name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    got, want, atol = logits_and_recorded(model, name)
    assert bool(np.abs(got - want).max() <= atol) == same
    model.save_pretrained(tmp_path / "written")
    assert AutoConfig.from_pretrained(tmp_path / "written") == config


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_is_read_of_one_that_takes_pictures(prefix, tmp_path, caplog):
    folder = Path(shutil.copytree(FOLDERS / "gemma3", tmp_path / "gemma3"))
    config = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in config.items() if key not in ("architectures", "eos_token_id", "dtype")}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    whole |= {"vision_config": {"hidden_size": 8}, "image_token_index": 47, "eos_token_id": [1, 2], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(whole))

    def change(weights):
        for name in list(weights):
            weights[name.replace("model.", prefix)] = weights.pop(name)
        weights[prefix.replace("language_model.", "vision_tower.").replace("model.", "") + "a"] = np.ones(3, np.float32)

    change_weights(folder, change)
    model = AutoModelForCausalLM.from_pretrained(folder)
    got, want, atol = logits_and_recorded(model, "gemma3")
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    assert "only its text model is read" in caplog.text
    model.save_pretrained(tmp_path / "text")
    assert json.loads((tmp_path / "text" / "config.json").read_text())["architectures"] == ["Gemma3ForCausalLM"]


def test_longrope_goes_by_the_places_that_rows_have():
    """A row of at most the original length turns by the short factors, whatever the model has room for."""
    model = AutoModelForCausalLM.from_pretrained(FOLDERS / "phi3_long")
    tokens = to_tensor(np.random.default_rng(3).integers(0, 48, (1, 8)))
    short = AutoModelForCausalLM.from_pretrained(FOLDERS / "phi3_long", seq_len=8)
    long = LongRope(
        (1.0, 1.5, 2.0), (2.0, 3.0, 4.0), 7, factor=4.0, attention_factor=model.config.rope_scaling.magnitude
    )
    other = AutoModelForCausalLM.from_pretrained(FOLDERS / "phi3_long", rope_scaling=long)
    got, want = model(tokens).numpy(), short(tokens).numpy()
    np.testing.assert_array_equal(got, want)
    assert np.abs(other(tokens).numpy() - want).max() > 1e-3
    caches = [KVCache(model, 1, places) for places in (8, 16)]
    first, second = (model.project(model.extend(tokens, cache)).numpy() for cache in caches)
    sizes = {key: getattr(model.config, key) for key in ("hidden_size", "ffn_size", "num_heads", "num_layers")}
    atol = parity.tolerance(parity.forward_terms(sizes, 8), want)
    np.testing.assert_allclose(first, want, rtol=0, atol=atol)
    np.testing.assert_allclose(second, other(tokens).numpy(), rtol=0, atol=atol)
    with pytest.raises(ConfigError, match="3 numbers of short_factor and long_factor; 4 dims are turned"):
        AutoModelForCausalLM.from_pretrained(FOLDERS / "phi3_long", rotary_fraction=0.7)


def test_borders_of_yarn_may_lie_between_pairs():
    """Values of transformers 4.57.6, for heads of 64 and 4,096 positions."""
    sines = {whole: Yarn(4.0, 4096, truncate=whole).table(2, 64, 1e4)[1][1] for whole in (True, False)}
    scale = 0.1 * np.log(4) + 1
    np.testing.assert_allclose(
        np.arcsin(sines[True][16:19] / scale), [0.006538462, 0.004470523, 0.003027992], rtol=1e-5
    )
    np.testing.assert_allclose(
        np.arcsin(sines[False][16:19] / scale), [0.006556971, 0.004449954, 0.002986734], rtol=1e-5
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["LlamaForCausalLn"]}, "unknown architecture 'LlamaForCausalLn'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and only 'silu' or 'swish'"),
        ({"logit_scale": 2.0}, r"keys that are not known here: logit_scale=2.0; .* give ignore=\['logit_scale'\]"),
        ({"rope_scaling": {"rope_type": "su2", "factor": 2.0}}, "unknown type 'su2'"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
            "longrope.*long_factor.*fields of .*LongRope",
        ),
        ({"num_local_experts": 3, "model_type": "qwen3_moe", "num_experts": 4}, "num_experts is 4, and num_local_exp"),
        (
            {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full"], "model_type": "qwen2"},
            "give full",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 10{30}; give at most 65536"),
        ({"hidden_size": "24"}, "LlamaConfig: hidden_size is '24'; give int"),
        ({"tie_word_embeddings": 1}, "LlamaConfig: tie_embeddings is 1; give bool"),
        ({"rope_theta": "x"}, "a value is missing, of another type or out of range .ValueError: could not convert"),
        ({"use_rope": False, "use_mrope": False}, "not known here: use_rope=False; if"),
    ],
)
def test_a_model_that_is_another_one_is_refused(copied, config, message):
    named = {"architectures": None, "attention_bias": None, "mlp_bias": None} if "model_type" in config else {}
    change_config(copied, **({"model_type": "other"} if "architectures" in config else named), **config)
    with pytest.raises(ConfigError, match=message):
        AutoModelForCausalLM.from_pretrained(copied)
    if "logit_scale" in config:
        assert AutoConfig.from_pretrained(copied, ignore=["logit_scale"]).num_layers == 2


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "do not go together"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "do not go together; the newer architecture is parallel"),
        ("gptj", {"rotary_dim": None}, "rotary_dim is None; give an even number of at most 6"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 20}, "20 is no multiple of moe_intermediate_size 12"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLLG"}, "every 'LLLG'-th block .* or layer_types"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            "only full_attention is stretched",
        ),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "topk_method is 'group_limited_greedy', and only"),
        ("nemotron", {"hidden_act": "relu3"}, "NemotronConfig: unknown activation 'relu3'"),
        ("opt", {"activation_function": "gelu_fast"}, "OPTConfig: unknown activation 'gelu_fast'"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "is True, and only False can be had here"),
    ],
)
def test_a_variant_that_cannot_be_had_is_refused(name, changes, message, tmp_path):
    folder = Path(shutil.copytree(FOLDERS / name, tmp_path / name))
    change_config(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        AutoConfig.from_pretrained(folder)


def test_weights_that_do_not_fit_are_listed(copied):
    def change(weights):
        weights["model.layers.0.mlp.up.weight"] = weights.pop("model.layers.0.mlp.up_proj.weight")

    change_weights(copied, change)
    with pytest.raises(CheckpointError, match=r"missing: model.layers.0.mlp.up_proj.weight and not known: .*mlp.up\.w"):
        AutoModelForCausalLM.from_pretrained(copied)
    shutil.copy(FOLDERS / "llama" / "model.safetensors", copied)
    change_config(copied, intermediate_size=32)
    with pytest.raises(ShapeError, match=r"gate_proj.weight is \[28, 24\], which makes .* config.json says \[24, 32\]"):
        AutoModelForCausalLM.from_pretrained(copied)


def test_files_nobody_vouches_for(copied):
    whole = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(CheckpointError, match="but the file holds"):
        AutoModelForCausalLM.from_pretrained(copied)
    (copied / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(600))
    with pytest.raises(CheckpointError, match="loading it can run code"):
        AutoModelForCausalLM.from_pretrained(copied)
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"there is only pytorch_model.bin, which can run code"):
        AutoModelForCausalLM.from_pretrained(copied)
    (copied / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(CheckpointError, match=r"'../../etc/passwd' is not the name of a safetensors file"):
        AutoModelForCausalLM.from_pretrained(copied)
    (copied / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds no JSON object"):
        AutoModelForCausalLM.from_pretrained(copied)
    with pytest.raises(ConfigError, match="nowhere: no such folder or file; give"):
        AutoModelForCausalLM.from_pretrained(copied / "nowhere")


@pytest.mark.parametrize("named", [{"architectures": 3}, {"architectures": [1]}, {"model_type": ["llama"]}])
def test_a_family_is_named_by_a_name(copied, named):
    change_config(copied, **named)
    with pytest.raises(ConfigError, match=r"in config.json; they are a name and a list of names"):
        AutoConfig.from_pretrained(copied)


def test_what_cannot_be_had_is_said(copied):
    with pytest.raises(ConfigError, match="weights of a Llama, not of a Qwen2"):
        Qwen2.from_pretrained(copied)
    with pytest.raises(ConfigError, match=r"LlamaConfig has no 'seq_length'.*seq_len"):
        Llama.from_pretrained(copied, seq_length=16)
    scaling = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}
    with pytest.raises(ConfigError, match="dynamic, for 64 places; past 16 all tokens turn anew"):
        Llama.from_pretrained(copied, seq_len=64, rope_scaling=scaling)
    with pytest.raises(ConfigError, match="pp=2 splits a model into stages"):
        Llama.from_pretrained(copied, plan=Plan.from_degrees(pp=2, num_microbatches=2))
    with pytest.raises(ConfigError, match="max_shard_size='large'"):
        Llama(LlamaConfig.nano()).save_pretrained(copied, max_shard_size="large")


@pytest.fixture(scope="module")
def gguf():
    return pytest.importorskip("gguf", reason="the gguf library is not installed; pip install polyreme[convert]")


GGUF_KINDS = {
    "llama_llama3": "LLAMA", "llama_linear": "LLAMA", "llama_yarn": "LLAMA", "gemma": "GEMMA", "gemma2": "GEMMA2",
    "gemma3": "GEMMA3", "granite": "GRANITE", "olmo2": "OLMO2", "phi3_long": "PHI3", "phi3_partial": "PHI3",
    "phi": "PHI2", "olmo": "OLMO", "smollm3": "SMOLLM3", "stablelm": "STABLELM", "starcoder2": "STARCODER2",
    "cohere": "COMMAND_R", "cohere2": "COHERE2", "ernie4_5": "ERNIE4_5", "glm4": "GLM4", "mixtral": "LLAMA",
    "qwen2_moe": "QWEN2MOE", "qwen3_moe": "QWEN3MOE", "exaone4": "EXAONE4", "seed_oss": "SEED_OSS", "arcee": "ARCEE",
    "nemotron": "NEMOTRON",
}  # fmt: skip
GGUF_NUMBERS = {
    "sliding_window": "add_sliding_window",
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
    "embedding_multiplier": "add_embedding_scale",
    "residual_multiplier": "add_residual_scale",
    "attention_multiplier": "add_attention_scale",
    "logits_scaling": "add_logit_scale",
    "head_dim": "add_key_length",
    "rms_norm_eps": "add_layer_norm_rms_eps",
    "layer_norm_eps": "add_layer_norm_eps",
    "norm_epsilon": "add_layer_norm_eps",
    "norm_eps": "add_layer_norm_eps",
    "logit_scale": "add_logit_scale",
    "clip_qkv": "add_clamp_kqv",
    "use_parallel_residual": "add_parallel_residual",
    "num_experts": "add_expert_count",
    "num_local_experts": "add_expert_count",
    "num_experts_per_tok": "add_expert_used_count",
    "moe_intermediate_size": "add_expert_feed_forward_length",
    "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
}


def write_gguf(gguf, folder, path, change=lambda name, array: array, kind="LLAMA", **fields):
    """A folder as the program that makes GGUF files writes it, in 32 bits."""
    config = json.loads((folder / "config.json").read_text())
    config = {**(config.get("rope_parameters") or {}), **config}
    model, layers = gguf.MODEL_ARCH[kind], config["num_hidden_layers"]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[model])
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    for key, add in GGUF_NUMBERS.items():
        if config.get(key) is not None:
            getattr(writer, add)(config[key])
    write_rotary(writer, config)
    for name, value in fields.items():
        writer.add_string(name.replace("__", "."), value)
    names = gguf.get_tensor_name_map(model, layers)
    for name, array in stacked_experts(load_file(folder / "model.safetensors")).items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        part = next((part for part in heads if part in name), None)
        if part and kind in ("LLAMA", "GRANITE", "OLMO", "SMOLLM3", "ARCEE"):  # pairs that turn together as neighbours
            array = array.reshape(heads[part], 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if kind.startswith(("GEMMA", "NEMOTRON")) and name.endswith("norm.weight"):
            array = array + 1
        stem, ending = name.rsplit(".", 1)
        array = array[0] if stem.endswith("shared_expert_gate") else array
        writer.add_tensor(f"{names.get_name(stem)}.{ending}", change(name, array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stacked_experts(weights):
    """Weights, those of a block's experts in one array each."""
    stacks = {}
    for name in weights:
        if hit := re.search(r"\.experts\.\d+", name):
            stacks.setdefault(name.replace(hit[0], ".experts"), []).append((int(hit[0].split(".")[-1]), name))
    plain = {name: array for name, array in weights.items() if ".experts." not in name}
    return plain | {name: np.stack([weights[n] for _, n in sorted(parts)]) for name, parts in stacks.items()}


def write_rotary(writer, config):
    """How positions are stretched: the factors of LLaMA 3 lie among the weights, as do those of longrope."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(width * config.get("partial_rotary_factor", 1)))
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    longest, original = config["max_position_embeddings"], config.get("original_max_position_embeddings")
    if kind == "llama3":
        table = read_scaling(scaling).table(2, width, config["rope_theta"])
        slowed = np.arctan2(table[1], table[0])[1, : width // 2] * config["rope_theta"] ** (
            np.arange(0, width, 2) / width
        )
        writer.add_tensor("rope_freqs.weight", (1 / slowed).astype(np.float32))
    elif kind == "longrope":
        writer.add_rope_scaling_attn_factors(np.sqrt(1 + np.log(longest / original) / np.log(original)))
        writer.add_rope_scaling_orig_ctx_len(original)
        for length in ("short", "long"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.float32(scaling[f"{length}_factor"]))
    elif kind is not None:
        writer.add_string(f"{writer.arch}.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(scaling["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


@pytest.mark.slow_cases("seed_oss")
@pytest.mark.parametrize("name", GGUF_KINDS)
def test_gguf_files_of_other_kinds_give_the_same_logits(gguf, name, tmp_path):
    write_gguf(gguf, FOLDERS / name, tmp_path / "model.gguf", kind=GGUF_KINDS[name])
    # what files do not say follows from the sizes of the public models
    unsaid = {
        "gemma2": {"query_scalar": 7},
        "gemma3": {"query_scalar": 256, "full_blocks": (1,)},
        "smollm3": {"unturned_blocks": (0,)},
        "cohere2": {"full_blocks": (1,)},
        "exaone4": {"full_blocks": (1,)},
        "starcoder2": {"sliding_window": 5},
        "qwen3_moe": {"normalize_gates": False},
    }.get(name, {})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model.gguf", **unsaid)
    got, want, atol = logits_and_recorded(model, name)
    # factors and gains less 1 are rounded once more
    np.testing.assert_allclose(got, want, rtol=0, atol=4 * atol)
    if name == "gemma2":
        config = AutoConfig.from_pretrained(tmp_path / "model.gguf")
        assert (config.query_scalar, config.full_blocks, config.score_cap) == (8, (1,), 0.5)


def test_a_gguf_file_gives_the_same_logits(gguf, tmp_path):
    write_gguf(gguf, FOLDERS / "llama", tmp_path / "model.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model.gguf")
    got, want, atol = logits_and_recorded(model, "llama")
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    model.save_pretrained(tmp_path / "folder")
    for name, array in load_file(tmp_path / "folder" / "model.safetensors").items():
        np.testing.assert_array_equal(array, load_file(FOLDERS / "llama" / "model.safetensors")[name], err_msg=name)


def test_damaged_gguf_files_are_refused(gguf, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(gguf, FOLDERS / "llama", path)
    whole = path.read_bytes()
    for damaged in (whole[:40], whole[:4] + b"\x09" + whole[5:], whole[:24] + b"\xff" * 8 + whole[32:], whole[:-64]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="a damaged GGUF file"):
            AutoModelForCausalLM.from_pretrained(path)


def test_gguf_files_that_are_not_read(gguf, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(gguf, FOLDERS / "llama", path, llama__rope__scaling__type="su")
    with pytest.raises(ConfigError, match=r"rotary positions are stretched \(su, attn_factor 1.0\)"):
        AutoModelForCausalLM.from_pretrained(path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(CheckpointError, match="damaged GGUF file"):
        AutoModelForCausalLM.from_pretrained(path)
