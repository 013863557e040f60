"""Masked words: verses of a text that share rows, a BERT trained on them under a plan, what is refused."""

import numpy as np
import pytest

from polyreme.data.packing import NO_LABEL
from polyreme.errors import ConfigError, DataError
from polyreme.models.tokenizer import END_OF_TEXT, MASK, train_byte_level_bpe
from polyreme.recipes.data import masked_words
from polyreme.recipes.data.batches import Batch
from polyreme.recipes.estimate import num_parameters
from polyreme.recipes.planning import proving
from polyreme.recipes.weights.base import make_model
from tests.recipes.tiny_run import history, load, train

BERT = ["model.family=bert", "model.vocab_size=300"]
VERSES = [f"Ge{i}:{i} {'and ' * (i % 7)}there was light" for i in range(1, 200)]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(VERSES))
    return [*BERT, "data.text=a.txt", "data.synthetic_tokens=1000000", r"data.documents='^Ge\d+'"]


def corpus_of(folder, *settings):
    loaded = load(folder / "run", *settings)
    return masked_words.load_masked(loaded.config, loaded.folder)


@pytest.mark.parametrize("packing", ["best_fit", "none", "concat"])
def test_rows_of_verses(tmp_path, text, packing):
    corpus = corpus_of(tmp_path, *text, f"data.packing={packing}", "data.mask_rate=0.3", "model.seq_len=32")
    (tokens, ends, places), (asked, ids) = corpus.train[3]
    begins = [begin for begin in np.flatnonzero(places == 0) if ends[begin] - begin > 1]
    assert len(begins) == 1 if packing != "best_fit" else len(begins) > 1
    whole = tokens.copy()
    whole[asked[asked != NO_LABEL]] = ids[ids != NO_LABEL]
    for begin in begins if packing != "concat" else ():
        verse = corpus.tokenizer.decode(whole[begin : ends[begin]].tolist(), skip_special_tokens=False)
        assert verse.removesuffix(END_OF_TEXT) in VERSES
    assert MASK in corpus.shown(3, ("[[", "]]"))  # as data preview asks, whatever the samples are
    assert len(corpus.train) == 10 * len(corpus.train.rows)


@pytest.mark.slow  # the proof below takes the same step
def test_a_run_trains_on_them(tmp_path, text):
    train(tmp_path / "run", *text, "data.packing=best_fit", "train.steps=2", "train.warmup_steps=0")
    first, second = (loss for _, loss, *_ in history(tmp_path / "run"))
    assert second < first < 1.1 * np.log(300)


@pytest.mark.slow
def test_a_plan_is_proved_and_its_parameters_counted(tmp_path):
    config = load(tmp_path / "run", *BERT, "train.accumulation=2", "model.dropout=0").config
    assert proving.run(config, steps=1).holds
    assert num_parameters(config.model) == sum(p.size for p in make_model(config).parameters())


def test_what_a_bert_has_not(tmp_path):
    for setting, message in (
        ("plan.pp=2", r"plan\.pp=2: bert has no use for it"),
        ("model.tie_embeddings=false", "tie_embeddings=False: bert has none"),
        ("data.alignments=5", r"data\.alignments=5: bert is trained on masked_words, which have none"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path / "run", *BERT, setting)
    with pytest.raises(ConfigError, match=r"data\.mask_rate=0\.5: gpt is trained on tokens, which have none"):
        load(tmp_path / "run", "data.mask_rate=0.5")
    with pytest.raises(ConfigError, match="documents=line with text=synthetic, which has none"):
        load(tmp_path / "run", "data.documents=line")
    with pytest.raises(ConfigError, match=r"documents '\^\(' is no regular expression"):
        load(tmp_path / "run", "data.text=a.txt", "data.documents=^(")


def test_a_tokenizer_without_a_mask(tmp_path):
    train_byte_level_bpe(iter(VERSES), 280).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"the tokenizer has none of \[MASK\] <mask> for masked words"):
        masked_words._mask_of(tmp_path / "tokenizer.json", 300)


def test_samples_that_a_model_cannot_take(tmp_path):
    config = load(tmp_path / "run", *BERT).config
    (inputs, asked), *_ = masked_words.random_masked(config, 1)
    batch = Batch(np.arange(8) + 5, inputs, asked)
    masked_words.check_masked(batch, config.model, "step 1")
    asked[2, 0, 0] = 16
    with pytest.raises(DataError, match="step 1: sample 7 has place of a masked word 16; there are 0 to 15"):
        masked_words.check_masked(batch, config.model, "step 1")
