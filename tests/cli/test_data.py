"""polyreme data: what it writes and says, and how it refuses."""

import os

import pytest
from tokenizers import Tokenizer

from polyreme.cli.main import main
from polyreme.generation.tokenizer import TextTokenizer
from polyreme.models.tokenizer import END_OF_TEXT, train_byte_level_bpe

VERSES = "".join(f"And he said, Let there be {i}\n" for i in range(100))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With verses.txt and tokenizer.json in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "verses.txt").write_text(VERSES)
    train_byte_level_bpe(iter([VERSES]), 280).save("tokenizer.json")
    return tmp_path


def run(capsys, *words):
    """(exit code, what it prints, its error)."""
    code = main([*map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def prepare(capsys, *words):
    return run(capsys, "data", "prepare", "verses.txt", "--tokenizer", "tokenizer.json", "--output", "p", *words)


def test_prepare_stats_and_check(capsys, folder):
    code, said, _ = prepare(capsys, "--append-eos", "--documents", "line", "--split", "90,10")
    assert code == 0
    assert said.startswith("p_train: 90 documents, ")
    assert "p_valid: 10 documents, " in said
    code, said, _ = run(capsys, "data", "stats", "p_train", "p_valid.bin")
    assert code == 0
    assert "p_train: 90 documents, " in said
    assert "prepared from verses.txt; a vocabulary of 280" in said
    code, said, _ = run(capsys, "data", "check", "p_valid")
    assert code == 0
    assert "10 sequences in 10 documents, whole" in said
    assert "digests as prepared" in said


def test_check_finds_one_wrong_byte(capsys, folder):
    prepare(capsys)
    data = bytearray((folder / "p.bin").read_bytes())
    data[100] ^= 1
    (folder / "p.bin").write_bytes(data)
    assert run(capsys, "data", "check", "p")[::2] == (
        3,
        "error: p.bin: the file has changed since it was prepared: its digest differs; prepare it again\n"
        "more: polyreme explain PR401\n",
    )
    (folder / "p.json").unlink()
    code, said, _ = run(capsys, "data", "check", "p")
    assert (code, said.splitlines()[-1]) == (0, "no digests beside it: another program wrote it")
    os.truncate("p.bin", 100)
    code, _, error = run(capsys, "data", "check", "p")
    assert code == 3
    assert error.startswith("error: p.bin: 100 bytes, and p.idx says ")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--eos", "</s>"], 2, "--eos </s> without --append-eos has no use"),
        (["--append-eos", "--eos", "</s>"], 2, "--eos '</s>' is not a token of tokenizer.json"),
        (["--split", "x,y"], 2, "--split x,y: needs weights such as 98,2"),
        (["--tokenizer", "verses.txt"], 4, "verses.txt"),
        (["--tokenizer", "bad.json"], 3, "bad.json: not a readable tokenizer"),
        (["--tokenizer", "nowhere"], 2, "nowhere: no such folder or file"),
    ],
)
def test_refusals(capsys, folder, words, code, says):
    (folder / "bad.json").write_text("{}")
    got, _, error = prepare(capsys, *words)
    assert (got, says in error) == (code, True), error
    assert not (folder / "p.bin").exists()


def test_a_tokenizer_without_an_end_token(capsys, folder):
    tokenizer = train_byte_level_bpe(iter([VERSES]), 280).to_str().replace(END_OF_TEXT, "<|other|>")
    (folder / "tokenizer.json").write_text(tokenizer)
    code, _, error = prepare(capsys, "--append-eos")
    assert code == 2
    assert "nothing says which token of tokenizer.json ends a text; name it with --eos" in error
    assert prepare(capsys, "--append-eos", "--eos", "<|other|>")[0] == 0


def test_pack_compares_the_ways(capsys, folder):
    prepare(capsys, "--documents", "line")
    code, said, _ = run(capsys, "data", "pack", "p", "--seq-len", "64")
    assert code == 0
    rows = {line.split()[0]: int(line.split()[1]) for line in said.splitlines()[1:]}
    assert said.startswith("100 documents, 0 of them too long")
    assert rows["concat"] <= rows["best_fit"] < rows["none"] == 100


ROWS = """{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "And he said"}]}
{"prompt": "Who?", "completion": "there be"}
"""


def test_preview_and_check_of_rows(capsys, folder):
    (folder / "rows.jsonl").write_text(ROWS)
    tokenizer = Tokenizer.from_file("tokenizer.json")
    TextTokenizer(tokenizer, [tokenizer.token_to_id(END_OF_TEXT)], special={"eos_token": END_OF_TEXT}).save_pretrained(
        "."
    )
    options = ("--tokenizer", ".", "--template", "roles", "--max-seq-len", "64")
    code, said, error = run(capsys, "data", "preview", "rows.jsonl", *options)
    assert (code, error) == (0, "")
    assert "user: Who?\nassistant:[[ And he said<|endoftext|>]]" in said
    assert run(capsys, "data", "check", "rows.jsonl", *options)[0] == 0
    (folder / "rows.jsonl").write_text(ROWS + '{"prompt": "a", "completion": ""}')
    code, said, error = run(capsys, "data", "check", "rows.jsonl", *options)
    assert (code, "error: empty messages of assistant: 1 (rows.jsonl:3)" in said) == (3, True)
    assert "rows.jsonl: a model would learn something wrong" in error


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("preview", "rows.jsonl"), "rows become tokens by a tokenizer; give --tokenizer"),
        (("check", "rows.jsonl", "--tokenizer", "."), "has no chat template; name one with --template"),
        (
            ("preview", "rows.jsonl", "data.seed=1", "--tokenizer", "."),
            "settings are for a configuration, which rows.jsonl is not",
        ),
        (("check", "rows.jsonl", "--tokenizer", ".", "--template", "chatml"), "closes answers with <|im_end|>, which"),
    ],
)
def test_options_that_rows_need(capsys, folder, words, told):
    (folder / "rows.jsonl").write_text(ROWS)
    code, _, error = run(capsys, "data", *words)
    assert (code, told in error) == (2, True), error
