"""GGUF files of published weights: as llama.cpp's own names and order have them, read again, with a tokenizer."""

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from polyreme.errors import ConfigError
from polyreme.generation import AutoTokenizer, TextTokenizer
from polyreme.models import AutoModelForCausalLM
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.tokenizer import train_byte_level_bpe
from polyreme.recipes.weights import published
from tests.models.test_published import FOLDERS

gguf = pytest.importorskip("gguf", reason="the gguf library is not installed; pip install polyreme[convert]")
TEXT = "to be or not to be, that is the question: 12 né 北 <|endoftext|>"


def convert(source, target, **settings):
    said = []
    published.convert(source, target, say=said.append, **settings)
    return said


@pytest.fixture
def folder(tmp_path):
    """A LLaMA with a tokenizer of its own."""
    folder = shutil.copytree(FOLDERS / "llama", tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    trained = train_byte_level_bpe(iter([TEXT * 4]), 262)
    end = trained.token_to_id("<|endoftext|>")
    tokenizer = TextTokenizer(trained, [end], None, "{{ messages[0]['content'] }}", {"eos_token": "<|endoftext|>"})
    tokenizer.save_pretrained(folder)
    assert trained.get_vocab_size() > config["vocab_size"]
    return folder


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "q8_0"])
def test_weights_are_where_llama_cpp_looks_for_them(tmp_path, encoding):
    folder = tmp_path / "llama"
    Llama(LlamaConfig.nano(hidden_size=64, num_heads=4, num_kv_heads=2)).save_pretrained(folder)
    said = convert(folder, tmp_path / "model.gguf", dtype=encoding, verify=True)
    assert f"the same bits as {encoding}" in said[1]
    config = json.loads((folder / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    weights = load_file(folder / "model.safetensors")
    assert len(read) == len(weights)
    for name, array in weights.items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        kind = next((kind for kind in heads if kind in name), None)
        if kind:  # pairs that turn together as neighbours
            array = array.reshape(heads[kind], 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        tensor = read[names.get_name(name.removesuffix(".weight")) + ".weight"]
        assert tensor.shape.tolist() == list(array.shape[::-1])
        got = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(array.shape)
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            assert encoding == "float32" or array.ndim == 1
            np.testing.assert_array_equal(got, array)
        else:
            # half a step of 8 bits among the numbers of a block, or of 8 bits of a number
            assert np.abs(got - array).max() <= np.abs(array).max() / 127


@pytest.mark.slow_cases("granite", "olmo2", "stablelm", "cohere")
@pytest.mark.parametrize(
    "name",
    ["granite", "olmo2", "phi", "phi3_partial", "stablelm", "cohere", "ernie4_5", "glm4", "qwen2_moe", "mixtral"],
)
def test_other_families_are_read_again_as_they_were(name, tmp_path):
    """Under the library's names, in its ranks, and with the same config: positions that turn a part of a head too."""
    source = shutil.copytree(FOLDERS / name, tmp_path / name)
    config = json.loads((source / "config.json").read_text())
    if name == "phi3_partial":  # whose positions are stretched
        config["rope_scaling"] = None
        (source / "config.json").write_text(json.dumps(config))
    path = tmp_path / "model.gguf"
    convert(source, path)
    models = [AutoModelForCausalLM.from_pretrained(at) for at in (source, path)]
    for (ours, want), (_, got) in zip(*(model.named_parameters() for model in models), strict=True):
        np.testing.assert_array_equal(got.numpy(), want.numpy(), err_msg=ours)
    reader = gguf.GGUFReader(path)
    word = reader.fields["general.architecture"].contents()
    (arch,) = (arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == word)
    known = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[arch]}
    stems = {re.sub(r"^blk\.\d+", "blk.{bid}", tensor.name.rsplit(".", 1)[0]) for tensor in reader.tensors}
    assert stems <= known
    ranks = {len(tensor.shape) for tensor in reader.tensors if "_exps" in tensor.name}
    assert ranks == ({3} if name in ("qwen2_moe", "mixtral") else set())


def test_the_tokenizer_comes_with_it(folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    fields = tokenizer.gguf_fields(264)
    assert fields["tokenizer.ggml.tokens"][262:] == ["[PAD262]", "[PAD263]"]
    assert fields["tokenizer.ggml.token_type"][262:] == [5, 5]
    writer = gguf.GGUFWriter(tmp_path / "tokens.gguf", "llama")
    for key, value in fields.items():
        {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array}[type(value)](
            key, value
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    again = AutoTokenizer.from_pretrained(tmp_path / "tokens.gguf")
    for text in (TEXT, "  \n\n x1234", "\U0001f600 y"):
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert (again.end, again.bos, again.template) == (tokenizer.end, None, tokenizer.template)


def test_what_cannot_be_written_is_said(folder, tmp_path):
    said = convert(folder, tmp_path / "model.gguf")
    assert "no tokenizer is written: the tokenizer has 262 tokens, and the model rows for 48" in said
    with pytest.raises(ConfigError, match="there is something already; give a new file"):
        convert(folder, tmp_path / "model.gguf")
    for name, settings, message in (
        ("gpt_oss", {}, "a GptOssForCausalLM cannot be written as a GGUF file; LlamaForCausalLM"),
        ("starcoder2", {}, "cannot say of this model: sliding_window 5, which would be read as 0; write a folder"),
        ("qwen3_moe", {}, "cannot say of this model: normalize_gates False, which would be read as True"),
        ("llama_llama3", {}, "rotary positions that are stretched"),
        ("qwen2", {}, "sliding windows cannot be written"),
        ("llama", {"dtype": "q3"}, "encoding 'q3' of a GGUF file; the choices are float32"),
    ):
        with pytest.raises(ConfigError, match=message):
            convert(FOLDERS / name, tmp_path / "other.gguf", **settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "model.gguf"]


def test_a_tokenizer_without_a_name_for_its_cuts_is_refused(folder):
    said = json.loads((folder / "tokenizer.json").read_text())
    said["pre_tokenizer"] = {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match="a tokenizer of the kind BPE that cuts texts so cannot be written"):
        AutoTokenizer.from_pretrained(folder).gguf_fields(300)
