"""Text to samples: exactness of the tokens, the cache, concurrency, and every kind of bad file."""

import gzip
import math
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from polyreme.data import text_files, token_file
from polyreme.errors import ConfigError, DataError
from polyreme.models.families import BYTE_LEVEL
from polyreme.models.tokenizer import END_OF_TEXT, train_byte_level_bpe
from polyreme.recipes.config import DataConfig, LogConfig, PretrainConfig
from polyreme.recipes.data import text_data
from polyreme.registry import Reference

KJV = Path(__file__).parents[1] / "data" / "kjv.txt.gz"
VERSES = "".join(f"Ge{i}:{i % 7} And he said, Let there be light \u2014 \u8239 {i * i}\n\n" for i in range(1000))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "verses.txt"
    path.write_text(VERSES, encoding="utf-8")
    return path


def prepare(path, cache, *, vocab_size=400, seq_len=16, tokenizer=BYTE_LEVEL, **settings):
    data = DataConfig(text=[str(path)], **settings)
    return text_data.prepare(data, vocab_size=vocab_size, seq_len=seq_len, cache=cache, tokenizer=tokenizer)


def all_tokens(corpus):
    return np.fromfile(corpus.folder / "tokens.bin", dtype=corpus.train.tokens.dtype)


def test_tokens_decode_to_the_text_exactly(text, tmp_path):
    corpus = prepare(text, tmp_path / "cache")
    tokens = all_tokens(corpus)
    assert corpus.tokenizer.decode(tokens.tolist(), skip_special_tokens=True) == VERSES
    assert tokens[-1] == corpus.tokenizer.token_to_id(END_OF_TEXT)
    assert tokens.max() < corpus.vocab_size <= 400
    assert len(tokens) == corpus.num_tokens


def test_pieces_tokenize_as_the_whole(text, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_CHUNK_BYTES", 977)  # cuts fall within words, letters and white space
    chunks = list(text_files.read_chunks(text))
    assert len(chunks) > 50
    assert "".join(chunks) == VERSES
    corpus = prepare(text, tmp_path / "cache")
    whole = corpus.tokenizer.encode(VERSES).ids
    np.testing.assert_array_equal(all_tokens(corpus)[:-1], whole)


def test_rare_white_space_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_CHUNK_BYTES", 64)
    path = tmp_path / "odd.txt"
    odd = "one\x1c\n two\u00a0\u2003\n\n three \r\n\t\n" * 40
    path.write_bytes(odd.encode())
    chunks = list(text_files.read_chunks(path))
    assert "".join(chunks) == odd
    tokenizer = train_byte_level_bpe(iter(chunks), 300)
    pieces = [token for chunk in chunks for token in tokenizer.encode(chunk).ids]
    assert pieces == tokenizer.encode(odd).ids


def test_text_that_spells_the_marker_is_only_text(tmp_path):
    path = tmp_path / "marker.txt"
    path.write_text("the marker <|endoftext|> in words\n" * 200)
    corpus = prepare(path, tmp_path / "cache")
    end = corpus.tokenizer.token_to_id(END_OF_TEXT)
    assert np.count_nonzero(all_tokens(corpus) == end) == 1


def test_samples_and_labels(text, tmp_path):
    corpus = prepare(text, tmp_path / "cache")
    tokens = all_tokens(corpus)
    sample, labels = corpus.train[3]
    assert sample.dtype == labels.dtype == np.int32
    np.testing.assert_array_equal(sample, tokens[48:64])
    np.testing.assert_array_equal(labels, tokens[49:65])
    np.testing.assert_array_equal(corpus.train[-1][0], corpus.train[len(corpus.train) - 1][0])
    first, _ = corpus.validation[0]
    np.testing.assert_array_equal(first, tokens[corpus.train.stop : corpus.train.stop + 16])
    assert corpus.train.stop == len(tokens) - round(0.02 * len(tokens))
    with pytest.raises(IndexError, match="sample 99999 of a data set"):
        corpus.train[99999]


def test_dataset_goes_to_a_worker_without_its_tokens(text, tmp_path):
    corpus = prepare(text, tmp_path / "cache")
    expected, _ = corpus.train[1]
    sent = pickle.dumps(corpus.train)
    assert len(sent) < 1000
    np.testing.assert_array_equal(pickle.loads(sent)[1][0], expected)


def test_large_vocabularies_take_four_bytes(tmp_path):
    corpus = text_data.prepare(DataConfig(synthetic_tokens=5000), vocab_size=70_000, seq_len=8, cache=tmp_path)
    assert corpus.train.tokens.dtype == "uint32"
    assert all_tokens(corpus).max() > 1 << 16


def test_kept_folder_is_used_again(text, tmp_path):
    first = prepare(text, tmp_path / "cache")
    made = (first.folder / "tokens.bin").stat().st_mtime_ns
    second = prepare(text, tmp_path / "cache")
    assert (second.folder / "tokens.bin").stat().st_mtime_ns == made
    assert second.digest == first.digest


def test_same_text_elsewhere_gives_the_same_tokens(text, tmp_path):
    copy = tmp_path / "copy.txt.gz"
    copy.write_bytes(gzip.compress(VERSES.encode()))
    first, second = prepare(text, tmp_path / "one"), prepare(copy, tmp_path / "two")
    np.testing.assert_array_equal(all_tokens(first), all_tokens(second))
    assert first.digest == second.digest


def test_digest_follows_content_and_cut(text, tmp_path):
    cache = tmp_path / "cache"
    digests = {prepare(text, cache).digest, prepare(text, cache, vocab_size=300).digest}
    digests |= {prepare(text, cache, seq_len=8).digest, prepare(text, cache, validation_fraction=0.1).digest}
    text.write_text(VERSES.replace("Ge5:5", "Ge5:6"), encoding="utf-8")
    digests.add(prepare(text, cache).digest)
    assert len(digests) == 5


@pytest.mark.parametrize("name", ["tokens.bin", "tokenizer.json"])
def test_flipped_bit_in_kept_data_is_found_and_mended(text, tmp_path, name):
    corpus = prepare(text, tmp_path / "cache")
    good = (corpus.folder / name).read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    (corpus.folder / name).write_bytes(bad)
    with pytest.warns(UserWarning, match="does not match its digest; preparing it again"):
        again = prepare(text, tmp_path / "cache")
    assert (again.folder / name).read_bytes() == good
    assert again.digest == corpus.digest


@pytest.mark.one_in(4)
@pytest.mark.parametrize("facts", ["", "{", "[]", '{"files": 3}'])
def test_unreadable_facts_are_written_again(text, tmp_path, facts):
    corpus = prepare(text, tmp_path / "cache")
    (corpus.folder / "facts.json").write_text(facts)
    with pytest.warns(UserWarning, match="preparing it again"):
        assert prepare(text, tmp_path / "cache").digest == corpus.digest


def test_two_processes_at_once(text, tmp_path):
    code = (
        "import sys; from pathlib import Path; from polyreme.recipes.data import text_data as t;"
        "from polyreme.recipes.config import DataConfig;"
        "print(t.prepare(DataConfig(text=[sys.argv[1]]), vocab_size=400, seq_len=16, cache=Path(sys.argv[2])).digest)"
    )
    command = [sys.executable, "-c", code, str(text), str(tmp_path / "cache")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    digests = {run.communicate(timeout=60)[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert len(digests) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1  # the others cleared up after themselves


def test_what_a_killed_process_left_is_swept(text, tmp_path):
    old, new = tmp_path / "cache" / ".old", tmp_path / "cache" / ".new"
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (time.time() - 7200,) * 2)
    prepare(text, tmp_path / "cache")
    assert not old.exists()
    assert new.exists()


@pytest.mark.slow
def test_king_james_becomes_tokens_of_three_to_four_bytes(tmp_path):
    corpus = prepare(KJV, tmp_path, vocab_size=4096, seq_len=128)
    assert corpus.vocab_size == 4096
    assert corpus.tokenizer.decode(corpus.train[0][0].tolist()).startswith("Ge1:1 In the beginning God created")
    # byte-level BPE of 4096 on English: between three and four bytes a token
    assert 3 < 4_404_412 / corpus.num_tokens < 4


def test_synthetic_tokens_can_be_learnt():
    tokens = text_data.synthetic_tokens(50_000, vocab_size=64, seed=3)
    assert tokens.shape == (50_000,)
    assert tokens.min() >= 0
    assert tokens.max() == 63
    pairs = np.zeros((64, 64))
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    likeliest = pairs.max(1).sum() / pairs.sum()
    # 90% follow the rule and 1 in 64 of the rest by chance; 1 in 64 pairs joins two columns, a random one
    expected = (0.9 + 0.1 / 64) * 63 / 64 + 1 / 64 / 64
    assert abs(likeliest - expected) < 6 * math.sqrt(0.1 * 0.9 / 50_000) + 64 / 50_000
    np.testing.assert_array_equal(tokens, text_data.synthetic_tokens(50_000, vocab_size=64, seed=3))


def test_synthetic_tokens_have_no_tokenizer(tmp_path):
    data = DataConfig(synthetic_tokens=10_000)
    corpus = text_data.load_corpus(
        PretrainConfig(output=str(tmp_path), data=data, log=LogConfig(validation_interval=0))
    )
    assert corpus.tokenizer is None
    assert corpus.num_tokens == 10_000
    assert corpus.folder.parent == tmp_path / "data"
    assert len(corpus.train) == (9_800 - 1) // 128


def test_splits_that_do_not_fill_a_batch(tmp_path):
    with pytest.raises(DataError, match=r"1 validation samples are fewer than train\.global_batch=16; raise data"):
        text_data.load_corpus(PretrainConfig(output=str(tmp_path), data=DataConfig(synthetic_tokens=10_000)))
    data = DataConfig(synthetic_tokens=2000, validation_fraction=0.5)
    with pytest.raises(DataError, match=r"7 training samples are fewer than train\.global_batch=16"):
        text_data.load_corpus(PretrainConfig(output=str(tmp_path), data=data))


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"one\ntwo\nb\xffd\n", r"bad\.txt:3: byte 0xff is not UTF-8"),
        (b"one\ntwo\nend \xe8\x88", r"bad\.txt:3: byte 0xe8 is not UTF-8"),
        (b"", r"bad\.txt: the file has no text"),
        (b" \n\n\t\n", r"bad\.txt: the file has no text"),
        (b"too short\n", r"3 tokens for training do not fill one window of model\.seq_len=16"),
        (b"ok\n" + b"x" * (17 << 20), r"bad\.txt:2: line is longer than 16,777,216 bytes"),
    ],
    ids=["utf8", "torn-utf8", "empty", "blank", "short", "long-line"],
)
def test_text_that_cannot_be_used_is_named(tmp_path, contents, message):
    path = tmp_path / "bad.txt"
    path.write_bytes(contents)
    with pytest.raises(DataError, match=message):
        prepare(path, tmp_path / "cache")
    assert list((tmp_path / "cache").glob(".*")) == []


def test_bad_lines_are_left_out_up_to_a_number(tmp_path, caplog):
    good = [f"{i} and he said, let there be light" for i in range(400)]
    lines = [line.encode() for line in good]
    lines.insert(300, b"torn \xe8\x88")
    lines.insert(200, b"x" * (17 << 20))
    lines.insert(0, b"\xff")
    path = tmp_path / "bad.txt"
    path.write_bytes(b"\n".join(lines) + b"\n")
    with caplog.at_level("WARNING", "polyreme.data"):
        corpus = prepare(path, tmp_path / "cache", skip_bad=3)
    assert [(r.args[0].rpartition("bad.txt:")[2], *r.args[2:]) for r in caplog.records] == [
        ("1", 1, 3), ("202", 2, 3), ("303", 3, 3)
    ]  # fmt: skip
    decoded = corpus.tokenizer.decode(all_tokens(corpus).tolist(), skip_special_tokens=True)
    assert decoded == "\n".join(good) + "\n"
    with pytest.raises(DataError, match=r"bad\.txt:303: byte 0xe8 is not UTF-8; 2 lines before it were left out"):
        prepare(path, tmp_path / "cache", skip_bad=2)
    with pytest.raises(DataError, match=r"bad\.txt:1: byte 0xff .* up to n such lines with data\.skip_bad=n"):
        prepare(path, tmp_path / "cache")


def test_line_number_of_bad_bytes_far_into_a_file(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"a line of text\n" * 123_456 + b"\x80\n")
    with pytest.raises(DataError, match=r"bad\.txt:123457: byte 0x80"):
        list(text_files.read_chunks(path))


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"no" + b, lambda b: b[:300] + b"zz" + b[302:]]
)
def test_broken_gzip(tmp_path, damage):
    path = tmp_path / "bad.gz"
    path.write_bytes(damage(KJV.read_bytes()))
    with pytest.raises(DataError, match=r"bad\.gz:\d+: (broken gzip stream|byte 0x)"):
        prepare(path, tmp_path / "cache")


def test_missing_text_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(DataError, match=r"no file 'nowhere\.txt'; looked for .*configs/nowhere\.txt, "):
        text_data.resolve("nowhere.txt", tmp_path / "configs")
    with pytest.raises(DataError, match="looked for /nowhere/x"):
        text_data.resolve("/nowhere/x", tmp_path)


def test_text_beside_the_configuration_comes_first(text, tmp_path):
    assert text_data.resolve("verses.txt", tmp_path) == text
    assert text_data.resolve("data/kjv.txt.gz", tmp_path).resolve() == KJV.resolve()


def test_vocabulary_too_small_for_bytes(text, tmp_path):
    with pytest.raises(ConfigError, match="tokenizer_vocab_size=100 is too small: 257 hold every byte"):
        prepare(text, tmp_path / "cache", vocab_size=100)


def train_one_too_many(pieces, vocab_size):
    """A tokenizer of one word more than it may have."""
    return Tokenizer(WordLevel({END_OF_TEXT: 0} | {str(n): n for n in range(1, vocab_size + 1)}, unk_token="1"))


def train_without_end(pieces, vocab_size):
    return Tokenizer(WordLevel({"1": 0}, unk_token="1"))


@pytest.mark.parametrize(
    ("trainer", "reason"),
    [
        ("train_one_too_many", "has 401 tokens, more than"),
        ("train_without_end", r"has no token <\|endoftext\|>; train it"),
    ],
)
def test_a_tokenizer_that_is_not_what_was_asked_for(text, tmp_path, trainer, reason):
    with pytest.raises(ConfigError, match=rf"{trainer}: its tokenizer {reason}"):
        prepare(text, tmp_path / "cache", tokenizer=Reference(__name__, trainer))


def test_tokens_of_another_tokenizer_are_prepared_anew(text, tmp_path):
    first = prepare(text, tmp_path / "cache")
    second = prepare(text, tmp_path / "cache", tokenizer=Reference("tests.recipes.words", "train_words"))
    assert first.digest != second.digest
    assert second.tokenizer.encode("And he").tokens == ["And", "he"]


def test_cache_that_cannot_be_written(text, tmp_path):
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(ConfigError, match=r"cannot keep prepared data there: .*set output= or data\.cache="):
        prepare(text, tmp_path / "cache")


def test_text_is_a_folder(tmp_path):
    with pytest.raises(DataError, match="no file"):
        prepare(tmp_path, tmp_path / "cache")


def test_no_space_left_is_named(text, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(text_data, "_sync", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        prepare(text, tmp_path / "cache")


def test_a_token_file_that_changes_under_a_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(token_file, "BLOCK_BYTES", 1000)
    corpus = text_data.prepare(DataConfig(synthetic_tokens=5000), vocab_size=100, seq_len=8, cache=tmp_path)
    path = corpus.train.tokens.path
    whole = path.read_bytes()
    windows = [corpus.train[i][0] for i in range(len(corpus.train))]
    np.testing.assert_array_equal(np.concatenate(windows), np.frombuffer(whole, np.uint16)[: 8 * len(windows)])
    sent = pickle.loads(pickle.dumps(corpus.train))

    def flip(keeps_time):
        status = path.stat()
        with path.open("r+b") as file:
            file.seek(2500)
            file.write(bytes([whole[2500] ^ 1]))
        if keeps_time:  # as a disk does that loses a bit
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    flip(keeps_time=True)
    np.testing.assert_array_equal(sent[0][0], windows[0])
    with pytest.raises(DataError, match=r"tokens\.bin: .*changed under this run: bytes from 2,000 on are not those"):
        sent[2500 // 16]
    os.utime(path)
    with pytest.raises(DataError, match=r"tokens\.bin: .*it was written to; let nothing else write there"):
        corpus.train[0]
    os.truncate(path, 3000)  # a mapped file would end the process here
    with pytest.raises(DataError, match=r"3,000 bytes, 10,000 when it was opened"):
        corpus.train[300]
    with pytest.warns(UserWarning, match="does not match its digest; preparing it again"):
        again = text_data.prepare(DataConfig(synthetic_tokens=5000), vocab_size=100, seq_len=8, cache=tmp_path)
    np.testing.assert_array_equal(again.train[300][0], windows[300])
