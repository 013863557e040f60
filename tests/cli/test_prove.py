"""`polyreme prove --serve`: what it compares, and what it refuses."""

import pytest

pytest.importorskip("starlette")

from polyreme.cli.main import main
from polyreme.models.decoders.llama import Llama, LlamaConfig
from tests.serving.scripted import tokenizer_of


def test_it_says_what_it_compared(tmp_path, capsys):
    tokenizer = tokenizer_of()
    tokenizer.save_pretrained(tmp_path)
    Llama(LlamaConfig.nano(vocab_size=tokenizer.vocab_size, seq_len=32)).save_pretrained(tmp_path)
    assert main(["prove", "--serve", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("the same bits") == 6


def test_settings_of_training_are_refused(tmp_path, capsys):
    assert main(["prove", "--serve", str(tmp_path), "--steps", "3"]) == 2
    assert "settings and --steps are for training" in capsys.readouterr().err
