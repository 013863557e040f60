"""polyreme eval: what it prints and keeps, and what it refuses before a model is loaded."""

import json

import pytest

from polyreme.cli.main import main
from polyreme.core import rng
from polyreme.models.llama import Llama, LlamaConfig
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
