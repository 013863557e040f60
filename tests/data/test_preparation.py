"""Text to pairs: the tokens are those of the documents one by one, in any form of file, for any number of workers."""

import gzip
import json
import os

import numpy as np
import pytest
from tokenizers import Tokenizer

from polyreme.data import documents, text_files
from polyreme.data.documents import DocumentForm
from polyreme.data.preparation import Preparation, prepare, read_facts
from polyreme.data.token_pair import TokenPair
from polyreme.errors import ConfigError, DataError
from polyreme.models.tokenizer import END_OF_TEXT, train_byte_level_bpe

TEXTS = [f"verse {i}: let there be light \u2014 {i * i}" + "\nand more" * (i % 3) for i in range(50)]
TOKENIZER = train_byte_level_bpe(iter(TEXTS), 300)
END = TOKENIZER.token_to_id(END_OF_TEXT)


def rows(*texts):
    return "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts)


def how(**settings):
    return Preparation(TOKENIZER.to_str(), **settings)


def texts_of(prefix):
    pair = TokenPair(prefix)
    return [TOKENIZER.decode(pair.sequence(i).tolist(), skip_special_tokens=False) for i in range(len(pair))]


def write_zst(path, data):
    zstandard = pytest.importorskip("zstandard")
    half = len(data) // 2  # of two frames
    path.write_bytes(zstandard.compress(data[:half]) + zstandard.compress(data[half:]))


def write_parquet(path, texts):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": texts, "n": [1] * len(texts)}), path)


WRITERS = {
    "a.jsonl": lambda path: path.write_text(rows(*TEXTS)),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(rows(*TEXTS).encode())),
    "a.json.zst": lambda path: write_zst(path, rows(*TEXTS).encode()),
    "a.parquet": lambda path: write_parquet(path, TEXTS),
    "a.txt": lambda path: path.write_text("\n\n".join(TEXTS)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_form_of_file_gives_the_same_documents(tmp_path, name, monkeypatch):
    monkeypatch.setattr(text_files, "_CHUNK_BYTES", 300)  # so that documents are cut
    WRITERS[name](tmp_path / name)
    prepare([tmp_path / name], tmp_path / "p", how(end=END, form=DocumentForm("paragraph")))
    assert texts_of(tmp_path / "p") == [text + END_OF_TEXT for text in TEXTS]
    expected = np.concatenate([[*TOKENIZER.encode(text).ids, END] for text in TEXTS])
    np.testing.assert_array_equal(np.fromfile(tmp_path / "p.bin", np.uint16), expected)


@pytest.mark.parametrize(
    ("division", "expected"),
    [
        ("file", ["one\ntwo\n \n\nthree\r\n\r\nfour"]),
        ("paragraph", ["one\ntwo", "three", "four"]),
        ("line", ["one", "two", "three\r", "four"]),
        ("^t|^f", ["one", "two\n ", "three", "four"]),
    ],
)
def test_what_a_document_of_a_text_file_is(tmp_path, division, expected):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n \n\nthree\r\n\r\nfour")
    prepare([tmp_path / "a.txt"], tmp_path / "p", how(form=DocumentForm(division)))
    assert texts_of(tmp_path / "p") == expected


def test_documents_that_begin_with_a_line_are_cut_anywhere_between(tmp_path, monkeypatch):
    texts = [f"Ge{i}: in the\n\nGe of {'w' * (7 * i % 40)}\u00e9" for i in range(60)]
    (tmp_path / "a.txt").write_text("\n".join(["before", *texts]), encoding="utf-8")
    monkeypatch.setattr(text_files, "_CHUNK_BYTES", 70)
    prepare([tmp_path / "a.txt"], tmp_path / "p", how(form=DocumentForm(r"^Ge\d+:")))
    assert texts_of(tmp_path / "p") == ["before", *texts]


def test_a_form_that_is_no_regular_expression():
    with pytest.raises(ConfigError, match="is no regular expression: the repetition number is too large"):
        DocumentForm("^a{99999999999}")
    with pytest.raises(ConfigError, match=r"documents '\^\(' is no regular expression: missing \), unterminated"):
        DocumentForm("^(")
    with pytest.raises(ConfigError, match=r"documents 'lines' is unknown; did you mean 'line'\?, or give a regular"):
        DocumentForm("lines")


@pytest.mark.process
def test_any_number_of_workers_writes_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_CHUNK_BYTES", 500)
    (tmp_path / "a.jsonl").write_text(rows(*TEXTS) + "not json\n" + rows(*TEXTS))
    for workers in (0, 2):
        prepare([tmp_path / "a.jsonl"], tmp_path / str(workers), how(workers=workers, parts=(3, 1), skip_bad=1))
    for ending in ("_train.bin", "_train.idx", "_valid.bin", "_valid.idx", "_train.json"):
        assert (tmp_path / f"0{ending}").read_bytes() == (tmp_path / f"2{ending}").read_bytes()


def test_documents_are_dealt_out_by_weight(tmp_path):
    (tmp_path / "a.jsonl").write_text(rows(*TEXTS))
    written = prepare([tmp_path / "a.jsonl"], tmp_path / "p", how(parts=(90, 6, 4)))
    assert [count for count, _ in written.pairs.values()] == [45, 3, 2]
    parts = [texts_of(tmp_path / f"p_{name}") for name in ("train", "valid", "test")]
    assert sorted(text for part in parts for text in part) == sorted(TEXTS)


def test_text_that_spells_a_marker_is_only_text(tmp_path):
    (tmp_path / "a.txt").write_text(f"the marker {END_OF_TEXT} in words")
    prepare([tmp_path / "a.txt"], tmp_path / "p", how(end=END))
    tokens = TokenPair(tmp_path / "p").sequence(0).tolist()
    assert tokens.count(END) == 1
    assert tokens[-1] == END


def test_a_tokenizer_that_cuts_and_pads_cuts_nothing(tmp_path):
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    (tmp_path / "a.txt").write_text(TEXTS[2])
    prepare([tmp_path / "a.txt"], tmp_path / "p", Preparation(tokenizer.to_str()))
    assert texts_of(tmp_path / "p") == [TEXTS[2]]


def test_facts_and_tokenizer_stand_beside_the_pair(tmp_path):
    (tmp_path / "a.txt").write_text(TEXTS[0])
    prepare([tmp_path / "a.txt"], tmp_path / "p", how())
    facts = read_facts(tmp_path / "p")
    assert (facts["sources"], facts["num_documents"]) == (["a.txt"], 1)
    assert Tokenizer.from_file(str(tmp_path / "p.tokenizer.json")).get_vocab() == TOKENIZER.get_vocab()
    assert read_facts(tmp_path / "nothing") is None
    for text in ("{", "[]"):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(DataError, match=r"p\.json: (cannot be read|does not say what a pair was made of)"):
            read_facts(tmp_path / "p")


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2: not JSON .* up to n such lines with --skip-bad=n"),
        ("a.jsonl", b'{"body": "x"}\n', r"a\.jsonl:1: no text under 'text', but keys 'body'; give the key"),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: no text under 'text', but int"),
        ("a.jsonl", b'["text"]\n', r"a\.jsonl:1: a list, not an object; write one object a line"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl:1: 'text' has half of a surrogate pair"),
        ("a.jsonl", b"[" * 100_000 + b"\n", r"a\.jsonl:1: not JSON"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: not JSON .*decode"),
        ("a.txt", b"fine\nb\xe8d\n", r"a\.txt:2: byte 0xe8 is not UTF-8"),
        ("a.txt", b" \n\n", r"p: no documents for it in .*a\.txt; give more text"),
        ("a.txt.gz", gzip.compress(os.urandom(5000))[:3000], r"a\.txt\.gz:\d+: broken gzip stream: .*ended"),
        ("a.parquet", b"PAR1 no", r"a\.parquet: cannot be read as Parquet"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfdjunk", r"a\.jsonl\.zst:1: broken zstd stream"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, data, says):
    pytest.importorskip("zstandard" if name.endswith("zst") else "pyarrow")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=says):
        prepare([tmp_path / name], tmp_path / "p", how())
    assert os.listdir(tmp_path) == [name]


def test_a_torn_zst_file_is_not_taken_for_a_whole_one(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    whole = zstandard.compress(rows(*TEXTS).encode())
    for cut in (2, len(whole) // 2, len(whole) - 1):
        (tmp_path / "a.jsonl.zst").write_bytes(whole[:-cut])
        with pytest.raises(DataError, match=r"broken zstd stream: it ends within a zstd frame|:1: (not JSON|byte)"):
            prepare([tmp_path / "a.jsonl.zst"], tmp_path / "p", how())


def test_columns_of_parquet_that_are_not_text(tmp_path):
    pytest.importorskip("pyarrow")
    write_parquet(tmp_path / "a.parquet", ["x", None, "y"])
    with pytest.raises(DataError, match=r"a\.parquet: row 2: 'text' is empty \(null\); fill it"):
        prepare([tmp_path / "a.parquet"], tmp_path / "p", how())
    with pytest.raises(DataError, match=r"no column 'txt'; did you mean 'text'\?"):
        prepare([tmp_path / "a.parquet"], tmp_path / "p", how(form=DocumentForm(key="txt")))
    with pytest.raises(DataError, match=r"column 'n' is of int64, not of text"):
        prepare([tmp_path / "a.parquet"], tmp_path / "p", how(form=DocumentForm(key="n")))


def test_lines_that_may_be_left_out_are_counted(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text("x\n" + rows("a") + "y\n" + rows("b", ""))
    written = prepare([tmp_path / "a.jsonl"], tmp_path / "p", how(skip_bad=2))
    assert texts_of(tmp_path / "p") == ["a", "b"]
    assert written.left_out == {"lines that cannot be read": 2}
    with pytest.raises(DataError, match=r"a\.jsonl:3: .*1 lines before it .* all that --skip-bad allows"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "q", how(skip_bad=1))


def test_settings_that_cannot_be_meant(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x" * 100)
    for settings, says in (
        ({"parts": (1, 1, 1, 1)}, "give one to three weights above 0"),
        ({"parts": (1, 0)}, "give one to three weights above 0"),
        ({"parts": (1, float("nan"))}, "give one to three weights above 0"),
        ({"workers": -1}, "workers=-1"),
    ):
        with pytest.raises(ConfigError, match=says):
            how(**settings)
    with pytest.raises(ConfigError, match=r"documents 'verse' is unknown"):
        DocumentForm("verse")
    with pytest.raises(ConfigError, match="end token 300 is not one of the tokenizer's, 0 to 299"):
        prepare([tmp_path / "a.txt"], tmp_path / "p", how(end=300))
    (tmp_path / "a.pdf").touch()
    with pytest.raises(
        ConfigError, match=r"a\.pdf: the name does not say what the file holds; end it with one of \.txt"
    ):
        prepare([tmp_path / "a.pdf"], tmp_path / "p", how())
    (tmp_path / "a.pdf").unlink()
    with pytest.raises(DataError, match="a folder, not a file; give files of text"):
        prepare([tmp_path], tmp_path / "p", how())
    with pytest.raises(DataError, match=r"b\.txt: no such file"):
        prepare([tmp_path / "b.txt"], tmp_path / "p", how())
    with pytest.raises(DataError, match="no documents for it"):
        prepare([tmp_path / "a.txt"], tmp_path / "p", how(parts=(98, 2)))
    monkeypatch.setattr(documents, "_MAX_DOCUMENT_BYTES", 50)
    with pytest.raises(DataError, match=r"a\.txt:1: a document of over 50 bytes, with documents=file; break it up, or"):
        prepare([tmp_path / "a.txt"], tmp_path / "p", how())
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("library", ["zstandard", "pyarrow.parquet"])
def test_a_missing_library_is_named(tmp_path, monkeypatch, library):
    monkeypatch.setitem(__import__("sys").modules, library, None)
    name = "a.parquet" if "pyarrow" in library else "a.txt.zst"
    (tmp_path / name).write_bytes(b"\x28\xb5\x2f\xfd....")
    with pytest.raises(ConfigError, match=r"pip install polyreme\[data\]"):
        prepare([tmp_path / name], tmp_path / "p", how())


@pytest.mark.process
def test_duplicates_are_left_out_by_any_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_CHUNK_BYTES", 500)
    (tmp_path / "a.jsonl").write_text(rows(*TEXTS, TEXTS[3], TEXTS[5].upper(), *TEXTS[:2]))
    counts = {}
    for dedup, workers in (("exact", 0), ("minhash", 0), ("minhash", 2)):
        prefix = tmp_path / f"{dedup}{workers}"
        counts[dedup, workers] = prepare([tmp_path / "a.jsonl"], prefix, how(dedup=dedup, workers=workers)).left_out
        assert read_facts(prefix)["dedup"] == dedup
    assert counts["exact", 0] == {"duplicates": 3}
    assert counts["minhash", 0]["duplicates"] >= 4
    assert texts_of(tmp_path / "exact0") == [*TEXTS, TEXTS[5].upper()]
    assert (tmp_path / "minhash0.bin").read_bytes() == (tmp_path / "minhash2.bin").read_bytes()
    with pytest.raises(ConfigError, match="dedup 'near' is unknown"):
        how(dedup="near")
