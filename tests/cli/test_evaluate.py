"""polyreme eval: what it prints and keeps, and what it refuses before a model is loaded."""

import json

import pytest

from polyreme.cli.main import main
from polyreme.core import rng
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.files import adapters
from polyreme.nn import LoRA
from polyreme.ops.random import standard_normal
from tests.serving.scripted import tokenizer_of


def test_rows_are_added_to_the_output(tmp_path, capsys):
    tokenizer = tokenizer_of()
    tokenizer.save_pretrained(tmp_path)
    rng.seed(3)
    Llama(LlamaConfig.nano(vocab_size=tokenizer.vocab_size, seq_len=32)).save_pretrained(tmp_path)
    (tmp_path / "a.txt").write_text("to be or not to be " * 4)
    words = [
        "eval",
        str(tmp_path),
        "--tasks",
        "ppl",
        "--data",
        str(tmp_path / "a.txt"),
        "--output",
        str(tmp_path / "r"),
    ]
    assert main([*words, "--max-length", "16"]) == 0
    assert main([*words, "--max-length", "16", "--stride", "4"]) == 0
    said = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    assert [row["stride"] for row in rows] == [8, 4]
    assert said[0].startswith(f"ppl: nats_per_token {rows[0]['nats_per_token']:.4f}, perplexity ")
    assert (rows[0]["dtype"], rows[0]["plan"], rows[0]["num_fewshot"]) == ("float32", "one device", 0)


@pytest.mark.slow
def test_adapters_and_caches_are_put_to_tasks_and_write(tmp_path, capsys):
    base, adapter, tokenizer = tmp_path / "base", tmp_path / "run" / "adapter", tokenizer_of()
    tokenizer.save_pretrained(base)
    rng.seed(3)
    model = Llama(LlamaConfig.nano(vocab_size=tokenizer.vocab_size, seq_len=32))
    model.save_pretrained(base)
    for layer in adapters.add_adapters(model, LoRA(rank=2)).values():
        layer.lora_b.set_value(standard_normal(layer.lora_b.shape))
    adapters.write_adapter(model, adapter)
    (tmp_path / "a.txt").write_text("to be or not to be " * 4)
    words = ["--tasks", "ppl", "--data", str(tmp_path / "a.txt"), "--output", str(tmp_path / "r")]
    chosen = ["--adapter", str(adapter), "--kv-cache-dtype", "int8"]
    for options in ([], chosen[:2], chosen):
        assert main(["eval", str(base), *words, *options]) == 0
    plain, adapted, rounded = (json.loads(line) for line in (tmp_path / "r").read_text().splitlines())
    assert abs(adapted["nats_per_token"] - plain["nats_per_token"]) > 0.01
    assert 0 < abs(rounded["nats_per_token"] - adapted["nats_per_token"]) < 0.01
    assert (rounded["adapter"], rounded["kv_cache_dtype"]) == (str(adapter), "int8")
    assert "adapter" not in plain
    capsys.readouterr()
    texts = set()
    for options in ([], chosen):
        assert main(["generate", str(base), "--prompt", "to", "--temperature", "0", *options]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 2
    assert main(["eval", str(base), *words, "--adapter", str(tmp_path / "run")]) == 4
    assert f"give the folder of an adapter, as {adapter}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["x", "--tasks", "pll"], 2, "unknown task 'pll'; did you mean 'ppl'"),
        (["nowhere", "--tasks", "ppl"], 2, "nowhere: no such folder or file"),
        (["http://127.0.0.1:9", "--tasks", "ppl"], 3, "is a server there?"),
    ],
)
def test_what_is_refused(capsys, words, code, told):
    assert main(["eval", *words]) == code
    assert told in capsys.readouterr().err
