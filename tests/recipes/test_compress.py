"""polyreme quantize and polyreme prune: what they write, tell, refuse, and that it is taken again."""

import json
import shutil
import string

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from polyreme.cli.main import main
from polyreme.errors import ConfigError
from polyreme.generation import LLM, SamplingParams
from polyreme.io import safetensors_file
from polyreme.models.auto import AutoModelForCausalLM
from polyreme.recipes.weights.trained import dtype_of
from tests.compression.trained import FIXTURE, TEXT, ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The small model with a tokenizer of bytes and a text."""
    out = tmp_path_factory.mktemp("source")
    shutil.copytree(FIXTURE, out / "model")
    pieces = {chr(i) if chr(i) in string.printable else f"<{i}>": i for i in range(128)}
    tokenizer = Tokenizer(models.WordLevel(pieces, unk_token="<127>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(out / "model" / "tokenizer.json"))
    text = bytes(ids()[300_000:303_000].astype(np.uint8)).decode("ascii", "replace")
    (out / "text.txt").write_text(text)
    return out


def run(folder, capsys, command, *options, out="out"):
    code = main([command, str(folder / "model"), str(folder / out), "--data", str(folder / "text.txt"), *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.slow
def test_a_folder_says_that_its_caches_are_of_8_bits(folder, capsys):
    code, _, err = run(folder, capsys, "quantize", "--type", "a8w8c8", "--length", "64", out="c8")
    assert code == 0, err
    run(folder, capsys, "quantize", "--type", "a8w8", "--length", "64", out="c16")
    with_cache, without = (json.loads((folder / out / "compression.json").read_text()) for out in ("c8", "c16"))
    # measured through the cache: another number, hardly a worse one
    assert with_cache["perplexity_after"] != without["perplexity_after"]
    assert with_cache["perplexity_after"] < 1.01 * without["perplexity_after"]
    writers = [LLM(folder / "c8"), LLM(folder / "c8", kv_cache_dtype="float32"), LLM(folder / "c16")]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0)
    rounded, wide, plain = ([text.generate("In the beginning", params)[0].outputs[0]] for text in writers)
    assert rounded[0].logprobs != wide[0].logprobs == plain[0].logprobs
    caches = [writer.generator.programs(1, 64).cache for writer in writers]
    # a byte a number and a scale of 4 for each head's 16, of 4 bytes a number
    assert caches[0].nbytes < 0.32 * caches[1].nbytes == 0.32 * caches[2].nbytes
    config = folder / "c8" / "config.json"
    settings = json.loads(config.read_text())
    settings["quantization_config"]["kv_cache_scheme"]["strategy"] = "tensor"
    config.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"kv_cache_scheme .*; caches of .* are read"):
        LLM(folder / "c8")


def nbytes(path):
    return sum(np.prod(e.shape) * e.dtype.itemsize for e in safetensors_file.Slices(path).entries.values())


def test_a_quantized_folder_is_measured_and_written_whole(folder, capsys):
    options = ("--method", "gptq", "--type", "wint4", "--group-size", "32", "--length", "64", "--report")
    code, out, err = run(folder, capsys, "quantize", *options, "--skip", "blocks.0.attention.q", out="w4")
    assert code == 0, err
    assert "read back: the same logits, bit for bit" in out
    assert len([line for line in out.splitlines() if line.startswith("  ") and ".ffn." in line]) == 6
    assert "most sensitive: --skip blocks." in out
    report = json.loads((folder / "w4" / "compression.json").read_text())
    assert report["perplexity_after"] < 1.1 * report["perplexity_before"]
    assert len(report["errors"]) == 13
    config = json.loads((folder / "w4" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "gptq"
    # 4 bits of 32, and a scale of 32 bits for 32 of them, of what lies in blocks; the two tables in full
    assert report["bytes_after"] < 0.5 * report["bytes_before"]
    model = LLM(folder / "w4")
    assert dtype_of(model.model) == "int4"
    text = model.generate("In the beginning", SamplingParams(temperature=0, max_tokens=4))
    assert len(text[0].outputs[0].token_ids) == 4
    # once more from there is refused, as is a folder that holds something
    code = main(["quantize", str(folder / "w4"), str(folder / "again"), "--data", str(folder / "text.txt")])
    assert code == 2
    assert "of few bits already" in capsys.readouterr().err
    code, _, err = run(folder, capsys, "quantize", out="w4")
    assert code == 2
    assert "there is something already" in err


def test_what_became_much_worse_is_not_written(folder, capsys):
    options = ("--method", "magnitude", "--sparsity", "0.9", "--length", "64")
    code, _, err = run(folder, capsys, "prune", *options, out="bad")
    assert code == 5
    assert "not written: perplexity rose from" in err
    assert not (folder / "bad").exists()
    assert not (folder / "bad.partial").exists()
    code, out, err = run(folder, capsys, "prune", *options, "--force", out="bad")
    assert code == 0, err
    assert "90.0% of the weights" in out
    assert (folder / "bad" / "compression.json").is_file()


def test_structured_pruning_leaves_a_narrower_model(folder, capsys):
    options = ("--method", "structured", "--sparsity", "0.25", "--length", "64", "--bound", "9")
    code, out, err = run(folder, capsys, "prune", *options, out="narrow")
    assert code == 0, err
    assert "32 of 128 channels gone" in out
    assert AutoModelForCausalLM.from_pretrained(folder / "narrow").config.ffn_size == 96


@pytest.mark.parametrize(
    ("command", "options", "code", "message"),
    [
        ("quantize", ("--method", "awq2"), 2, "--method awq2: unknown; did you mean 'awq'"),
        ("quantize", ("--method", "awq", "--type", "a8w8"), 2, "--method awq makes wint8 or wint4, not a8w8"),
        ("quantize", ("--type", "wint4", "--group-size", "48"), 2, "has 64 inputs; give what divides them, or --skip"),
        ("quantize", ("--type", "a8w8", "--group-size", "8"), 2, "wint8 and wint4 take groups of inputs"),
        ("quantize", ("--act-order",), 2, "--act-order is of gptq"),
        ("quantize", ("--skip", "blocks.7"), 2, "--skip blocks.7: no linear map is called so"),
        ("quantize", ("--length", "60", "--data", "MISSING.txt"), 3, "MISSING.txt: no such file"),
        ("quantize", ("--length", "9999"), 2, "--length 9999: the model has positions for"),
        ("prune", ("--sparsity", "4:2"), 2, "--sparsity 4:2: give a share of zeros"),
        ("prune", ("--method", "structured", "--sparsity", "2:4"), 2, "structured takes channels of all blocks"),
    ],
)
def test_what_cannot_be_done_is_refused(folder, capsys, command, options, code, message):
    got, _, err = run(folder, capsys, command, *options, out="refused")
    assert got == code
    assert message in " ".join(err.split())
    assert not (folder / "refused").exists()


def test_too_little_text_is_told(folder, capsys):
    short = folder / "short.txt"
    short.write_text("In the beginning")
    code = main(["quantize", str(folder / "model"), str(folder / "none"), "--data", str(short)])
    assert code == 3
    assert "16 tokens, and a row to calibrate on and one to measure on take 128" in " ".join(
        capsys.readouterr().err.split()
    )
    assert TEXT.exists()
