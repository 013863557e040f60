"""`polyreme bench latency` and `throughput`: what they count and tell, by a clock that is set."""

import json

import pytest

from polyreme.cli.main import main
from polyreme.core import rng
from polyreme.errors import ConfigError
from polyreme.generation import TextTokenizer
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.tokenizer import train_byte_level_bpe
from polyreme.recipes.inference import writing_speed
from polyreme.recipes.inference.writing_speed import WritingLoad


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = TextTokenizer(train_byte_level_bpe(iter(["ab"]), 258), [0])
    tokenizer.save_pretrained(folder)
    rng.seed(3)
    Llama(LlamaConfig.nano(vocab_size=tokenizer.vocab_size, seq_len=32)).save_pretrained(folder)
    return folder


def test_a_batch_is_timed_after_the_first_time(folder):
    ticks = iter([0, 100, 102, 110, 114])  # the first time is not ended
    report = writing_speed.latency(folder, WritingLoad(3, 5), batch_size=2, num_iters=2, clock=lambda: next(ticks))
    assert (report.output_tokens, report.seconds) == (10, [2, 4])
    told = json.loads(report.as_json())
    assert told["percentiles"]["p50"] == sum(report.seconds) / 2
    assert report.lines()[1].endswith("new tokens/s")


def test_tokens_of_all_requests_are_counted(folder):
    ticks = iter([10.0, 12.0])
    report = writing_speed.throughput(
        folder, WritingLoad(3, 5), num_prompts=4, max_num_seqs=2, clock=lambda: next(ticks)
    )
    assert (report.prompt_tokens, report.output_tokens, report.seconds) == (12, 20, 2.0)
    assert report.lines() == ["4 requests in 2.00 s: 2.00 requests/s, 16.00 tokens/s, 10.00 new tokens/s"]


def test_the_commands_tell_json_and_refuse_lengths(folder, capsys):
    words = [str(folder), "--input-len", "2", "--output-len", "3", "--json"]
    assert main(["bench", "latency", *words, "--batch-size", "1", "--num-iters", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["output_tokens"] == 3
    assert main(["bench", "throughput", *words, "--num-prompts", "2", "--max-num-seqs", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["output_tokens"] == 6
    with pytest.raises(ConfigError, match="30 tokens and 3 new ones, and the model has positions for 32"):
        writing_speed.latency(folder, WritingLoad(30, 3), batch_size=1, num_iters=1)
