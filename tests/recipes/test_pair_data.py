"""Runs on pairs of token files: which tokens they see, what resumes them, how what does not fit is refused."""

import json
import os
import shutil

import numpy as np
import pytest

from polyreme.cli.main import main
from polyreme.data.packing import NO_LABEL
from polyreme.data.preparation import Preparation, prepare
from polyreme.data.token_pair import PairWriter
from polyreme.errors import ConfigError, DataError
from polyreme.io import DataLoader
from polyreme.models.tokenizer import train_byte_level_bpe
from polyreme.recipes.config import DataConfig, DataSource, PretrainConfig
from polyreme.recipes.data import text_data
from polyreme.recipes.planning import proving
from polyreme.recipes.planning import verify as plan_verify
from tests.recipes.tiny_run import history, load, train


@pytest.fixture
def pairs(tmp_path):
    """Pairs a, b, c, whose tokens lie in 0..99, 100..199 and 200..299."""
    for number, name in enumerate("abc"):
        rng = np.random.default_rng(number)
        with PairWriter(tmp_path / name, "uint16") as writer:
            for _ in range(60):
                writer.add(100 * number + rng.integers(0, 100, rng.integers(2, 60)))
    return tmp_path


def sources(*entries):
    return f"data.train={json.dumps([{'path': path, 'weight': weight} for path, weight in entries])}"


NO_TEXT = ["data.text=synthetic", "data.synthetic_tokens=1000000"]
MIXED = [*NO_TEXT, sources(("a", 7), ("b", 0.3), ("c", 2.7)), "plan.mp=1", "model.dropout=0"]
DATA_PARALLEL = ["plan.dp=8", "plan.sharding=1", "plan.sharding_stage=0"]


def corpus_of(folder, *settings):
    loaded = load(folder / "run", *NO_TEXT, *settings)
    return text_data.load_corpus(loaded.config, loaded.folder)


def test_samples_are_mixed_by_weight_from_each_pair(pairs):
    corpus = corpus_of(pairs, *MIXED)
    kinds = [int(corpus.train[number][0][0]) // 100 for number in range(400)]
    assert [abs(kinds.count(kind) - 400 * share) <= 1 for kind, share in enumerate((0.7, 0.03, 0.27))] == [True] * 3
    tokens, labels = corpus.train[0]
    assert (tokens.dtype, tokens.shape, labels.shape) == (np.int32, (16,), (16,))
    np.testing.assert_array_equal(tokens[1:], labels[:-1])
    assert "16 counted in the loss" in corpus.shown(0)


def test_without_weights_each_pair_has_as_much_as_it_holds(pairs):
    corpus = corpus_of(pairs, 'data.train=["a", "b.bin"]')
    assert corpus.train.blend.shares == corpus.train.lengths


def test_splits_share_no_document(pairs):
    corpus = corpus_of(pairs, "data.train=[c]", "data.validation_fraction=0.2")
    (train,), (validation,) = corpus.train.datasets, corpus.validation.datasets
    assert train.stop == validation.start
    assert validation.stop == corpus.num_tokens
    assert 0.1 < (validation.stop - validation.start) / corpus.num_tokens <= 0.2
    other = corpus_of(pairs, "data.train=[c]", "data.validation=[b]")
    assert other.train.datasets[0].stop == other.num_tokens
    assert 100 <= other.validation[0][0].min() <= other.validation[0][0].max() < 200


@pytest.mark.slow
def test_a_resumed_run_reads_on_exactly_on_other_devices_from_another_folder(pairs, tmp_path):
    train(tmp_path / "run", *MIXED, *DATA_PARALLEL, "train.steps=5", "checkpoint.interval=3")
    seen = history(tmp_path / "run")
    (tmp_path / "moved").mkdir()
    for name in "abc":
        for ending in (".bin", ".idx"):
            shutil.move(pairs / f"{name}{ending}", tmp_path / "moved" / f"{name}{ending}")
    moved = [sources(("moved/a", 7), ("moved/b", 0.3), ("moved/c", 2.7))]
    train(
        tmp_path / "run",
        *MIXED,
        *moved,
        "train.steps=5",
        "plan.dp=4",
        "plan.sharding_stage=1",
        "data.num_workers=1",
        resume="3",
    )
    np.testing.assert_allclose([row[1] for row in history(tmp_path / "run")], [row[1] for row in seen], rtol=1e-5)
    with pytest.raises(DataError, match="cannot resume: the training data has changed"):
        train(
            tmp_path / "run",
            *MIXED,
            *DATA_PARALLEL,
            sources(("moved/a", 6), ("moved/b", 0.3), ("moved/c", 2.7)),
            "train.steps=7",
        )


def test_a_pair_that_changes_under_a_run_ends_it_by_name(pairs):
    corpus = corpus_of(pairs, *MIXED)
    os.truncate(pairs / "a.bin", 10)
    with pytest.raises(DataError, match=r"a\.bin: the file has changed under this run: 10 bytes, "):
        list(DataLoader(corpus.train, batch_size=8))


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        (["data.train=[nowhere]"], DataError, r"data\.train: no file 'nowhere\.idx'; looked for"),
        (["data.train=[a]", "data.validation=[n]"], DataError, r"data\.validation: no file 'n\.idx'"),
        (["data.train=[a]", "data.text=x.txt"], ConfigError, r"text=\['x\.txt'\] has no use with data\.train"),
        (["data.train=[a]", "data.skip_bad=1"], ConfigError, "skip_bad=1 has no use with data.train"),
        (["data.validation=[a]"], ConfigError, r"validation=.* has no use without data\.train"),
        (
            ["data.train=[a]", "data.validation=[b]", "data.validation_fraction=0.5"],
            ConfigError,
            r"validation_fraction=0\.5 has no use with data\.validation",
        ),
        (["data.train=[{path: a, weight: 0}]"], ConfigError, "data.train: .*greater than 0, got 0"),
        (["data.train=[{path: a, weight: .inf}]"], ConfigError, "data.train: .*finite"),
        (["data.train=[{path: a, wieght: 1}]"], ConfigError, "data.train"),
        (["data.train=[{path: a, weight: 1}, b]"], ConfigError, r"weights are \[1\.0, None\]; give each source one"),
        (["data.train=[a]", "train.global_batch=4096"], DataError, r"data\.train: \d+ samples are fewer than"),
        (
            ["data.train=[a]", "log.validation_interval=1"],
            DataError,
            r"data\.validation: \d samples are fewer than train\.global_batch=8; give more text",
        ),
        (
            ["data.train=[a]", "model.seq_len=4096"],
            DataError,
            r"a: its [\d,]+ tokens do not give data\.train one sample",
        ),
    ],
)
def test_refusals(pairs, settings, error, says):
    with pytest.raises(error, match=says):
        corpus_of(pairs, *settings)


def test_tokenizers_that_do_not_fit_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("let there be light and there was light\n" * 200)
    for name, text in (("a", "there was"), ("b", "let there be")):
        tokenizer = train_byte_level_bpe(iter([text]), 300)
        prepare([tmp_path / "a.txt"], tmp_path / name, Preparation(tokenizer.to_str()))
    with pytest.raises(DataError, match=r"b: prepared with another tokenizer than .*a; prepare both with one"):
        corpus_of(tmp_path, "data.train=[a, b]")
    with pytest.raises(DataError, match=r"b: prepared with a vocabulary of \d+, but model\.vocab_size=260; raise that"):
        corpus_of(tmp_path, "data.train=[b]", "model.vocab_size=260")
    assert corpus_of(tmp_path, "data.train=[b]").tokenizer is not None


def test_blend_says_what_a_run_reads(pairs, capsys):
    loaded = load(pairs / "run", *MIXED)
    assert main(["data", "blend", str(loaded.path), *loaded.overrides, "train.steps=100"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("800 samples: 100 steps of 8, 16 tokens each\n  a: 70% of samples, 560 of ")
    assert main(["data", "blend", str(loaded.path)]) == 2
    assert "the configuration has no data.train" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.slow_cases("none-shape1")
@pytest.mark.parametrize(("packing", "shape"), [("best_fit", (3, 16)), ("none", (16,))])
def test_documents_are_packed_or_padded_and_train(pairs, tmp_path, packing, shape):
    settings = [*MIXED, *DATA_PARALLEL, f"data.packing={packing}"]
    corpus = corpus_of(pairs, *settings)
    inputs, labels = corpus.train[0]
    assert (inputs.shape, labels.shape) == (shape, (16,))
    for row in range(20):
        head, *texts = corpus.shown(row).splitlines()
        counted = sum(len(json.loads(text)) for text in texts)
        assert head == f"16 tokens, {counted} counted in the loss"
        assert counted == (corpus.train[row][1] != NO_LABEL).sum()
    train(tmp_path / "run", *settings, "train.steps=2", "train.warmup_steps=0", "log.validation_interval=2")
    assert len(history(tmp_path / "run")) == 2


def test_packing_that_a_model_or_plan_cannot_take(pairs):
    with pytest.raises(ConfigError, match=r"deepseek_v3 takes one document a row; set data\.packing=none, or"):
        load(
            pairs / "run",
            *NO_TEXT,
            "data.train=[a]",
            "data.packing=best_fit",
            "model.family=deepseek_v3",
            "model.dropout=0",
        )
    with pytest.raises(ConfigError, match=r"packing=best_fit has no use without data\.train or data\.documents"):
        load(pairs / "run", *NO_TEXT, "data.packing=best_fit")


def test_made_up_rows_lie_as_packed_ones_do():
    config = PretrainConfig(data=DataConfig(train=[DataSource(path="a")], packing="best_fit"))
    (inputs, labels), *_ = text_data.random_rows(config, 1)
    first, second = config.samples.arrays(config)
    assert (inputs.shape, labels.shape) == (first.shape, second.shape) == ((16, 3, 128), (16, 128))
    for _, ends, places in inputs:
        begins = np.flatnonzero(places == 0)
        expected = np.repeat([*begins[1:], 128], np.diff([*begins, 128]))
        np.testing.assert_array_equal(ends, expected)
        np.testing.assert_array_equal(places, np.arange(128) - np.repeat(begins, np.diff([*begins, 128])))


@pytest.mark.slow
def test_a_plan_is_proved_and_compiled_with_packed_rows(pairs):
    settings = ["data.packing=best_fit", "train.global_batch=8", "train.warmup_steps=0"]
    config = load(pairs / "run", *MIXED, *DATA_PARALLEL, *settings).config
    assert plan_verify.verify(config, config.parallel_plan).total > 0
    proof = proving.run(config, steps=1)
    assert proof.holds
