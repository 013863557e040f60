"""Text data sets from tiny archives in their published formats. Numbers marked so are what PaddlePaddle 3.3.1 gives for
the same archives (the formats are known from its documentation, and were tried with it).
"""

import subprocess
import sys
import zipfile

import numpy as np
import pytest

from polyreme.errors import ConfigError, DataError
from polyreme.text import WMT14, WMT16, Conll05st, Imdb, Imikolov, Movielens, UCIHousing
from tests.io.archives import gzipped, tar


def listed(data):
    return [[np.asarray(part).tolist() for part in data[i]] for i in range(len(data))]


@pytest.fixture
def imdb(tmp_path):
    files = {
        "train/pos/0_9.txt": "A good, good film! It's GOOD.\n",
        "train/pos/1_9.txt": "good film\n",
        "train/neg/0_1.txt": "a bad film.\n",
        "test/pos/0_9.txt": "good bad ugly\n",
        "test/neg/0_1.txt": "film film\n",
        "train/unsup/0_0.txt": "unsup good\n",
    }
    return tar(tmp_path / "imdb.tgz", {f"aclImdb/{n}": t for n, t in files.items()})


def test_imdb(imdb):
    train, test = Imdb(imdb, cutoff=0), Imdb(imdb, "test", cutoff=1)
    # as PaddlePaddle
    assert train.word_idx == {b"film": 0, b"good": 1, b"a": 2, b"bad": 3, b"its": 4, b"ugly": 5, "<unk>": 6}
    assert listed(train) == [[[2, 1, 1, 0, 4, 1], [0]], [[1, 0], [0]], [[2, 3, 0], [1]]]
    assert listed(test) == [[[1, 3, 4], [0]], [[0, 0], [1]]]
    assert {part.dtype.name for part in train[0]} == {"int64"}
    with pytest.raises(ConfigError, match="Imdb: mode='val'; give one of 'train', 'test'"):
        Imdb(imdb, "val")


def test_imikolov(tmp_path):
    texts = {
        "train": " the cat sat on the mat \n the dog sat the\n the big\n",
        "valid": " the cat ran \n a dog \n the a a\n",
        "test": " the the cat \n",
    }
    path = tar(tmp_path / "ptb.tgz", {f"./simple-examples/data/ptb.{n}.txt": t for n, t in texts.items()})
    # as PaddlePaddle
    grams = listed(Imikolov(path, "NGRAM", 5, "train", 0))
    assert grams[:4] == [[2, 0, 4, 6, 9], [0, 4, 6, 9, 0], [4, 6, 9, 0, 8], [6, 9, 0, 8, 1]]
    assert len(grams) == 6
    data = Imikolov(path, "SEQ", -1, "test", 1)
    assert listed(data) == [[[2, 0, 0, 4], [0, 0, 4, 1]]]
    words = {b"the": 0, "<e>": 1, "<s>": 2, b"a": 3, b"cat": 4, b"dog": 5, b"sat": 6, "<unk>": 7}
    assert data.word_idx == words
    assert listed(Imikolov(path, "seq", 4, "train", 0)) == [[[2, 0, 7], [0, 7, 1]]]
    with pytest.raises(ConfigError, match="window_size=-1; give the n of n-grams"):
        Imikolov(path)
    with pytest.raises(ConfigError, match="data_type='WORD'"):
        Imikolov(path, "WORD")
    with pytest.raises(DataError, match=r"holds no simple-examples/data/ptb\.valid\.txt"):
        Imikolov(tar(path, {"simple-examples/data/ptb.train.txt": "a"}), "SEQ")


MOVIES = """1::Toy Story (1995)::Animation|Children's|Comedy
2::Jumanji (1995)::Adventure|Children's
3::Caf\xe9 (1995)::Comedy
"""
USERS = "1::F::1::10::48067\n2::M::56::16::70072\n"


def movielens(path, ratings):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (("movies", MOVIES), ("users", USERS), ("ratings", ratings)):
            archive.writestr(f"ml-1m/{name}.dat", text.encode("latin-1"))
    return path


def test_movielens(tmp_path):
    ratings = "".join(f"{u}::{m}::{1 + u * m % 5}::97830\n" for u in (1, 2) for m in (1, 2, 3))
    path = movielens(tmp_path / "ml.zip", ratings)
    data = Movielens(path, "train", 0.5)
    # draws of NumPy's generator from 0: .5488 .7152 .6028 .5449 .4237 .6459
    assert listed(data)[:2] == [
        [[1], [1], [0], [10], [1], [0, 1, 2], [0, 1], [-1.0]],
        [[1], [1], [0], [10], [2], [3, 1], [2], [1.0]],
    ]
    assert listed(Movielens(path, "test", 0.5)) == [[[2], [0], [6], [16], [2], [3, 1], [2], [5.0]]]
    assert len(data) == 5
    assert [part.dtype.name for part in data[0]] == ["int64"] * 7 + ["float64"]
    assert data.movie_info[3].title == "Caf\xe9 "
    assert data.categories_dict == {"Animation": 0, "Children's": 1, "Comedy": 2, "Adventure": 3}
    with pytest.raises(ConfigError, match=r"test_ratio=1\.5"):
        Movielens(path, test_ratio=1.5)
    with pytest.raises(DataError, match="a rating is of user 7 and film 1, one not listed"):
        Movielens(movielens(path, "7::1::3::0\n"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read"):
        Movielens(path)


def test_uci_housing(tmp_path):
    path, rows = tmp_path / "housing.data", np.random.default_rng(0).uniform(0, 10, (10, 14))
    np.savetxt(path, rows, fmt="%8.4f")
    train, test = UCIHousing(path), UCIHousing(path, "test")
    assert (len(train), len(test)) == (8, 2)
    features, price = train[0]
    assert (features.shape, price.shape, features.dtype, price.dtype) == ((13,), (1,), "float32", "float32")
    # as PaddlePaddle
    np.testing.assert_allclose(features[:3], [-0.05644041, -0.24782695, -0.52531224], rtol=1e-5)
    np.testing.assert_allclose(price, [0.3359], rtol=1e-6)
    np.testing.assert_allclose(test[0][0][:2], [0.11663651, -0.52637297], rtol=1e-5)
    path.write_text("1 2 3")
    with pytest.raises(DataError, match="3 numbers, which are no rows of 14"):
        UCIHousing(path)
    path.write_text("1 2 x")
    with pytest.raises(DataError, match="it holds numbers alone"):
        UCIHousing(path)


def test_wmt14(tmp_path):
    marks = "<s>\n<e>\n<unk>\n"
    files = {
        "wmt14/train.src.dict": f"{marks}le\nchat\n",
        "wmt14/train.trg.dict": f"{marks}the\ncat\n",
        "wmt14/train/train": "le chat noir\tthe cat black\nchat\tcat\nbad line\n",
        "wmt14/test/test": f"{'le ' * 78}\tcat\n{'le ' * 79}\tcat\nle\t{'cat ' * 81}\n",
        "wmt14/gen/gen": "chat le\tcat the\n",
    }
    path = tar(tmp_path / "wmt14.tgz", files)
    data = WMT14(path, "train", 5)
    # as PaddlePaddle
    assert listed(data) == [[[0, 3, 4, 2, 1], [0, 3, 4, 2], [3, 4, 2, 1]], [[0, 4, 1], [0, 4], [4, 1]]]
    assert listed(WMT14(path, "gen", 4)) == [[[0, 2, 3, 1], [0, 2, 3], [2, 3, 1]]]
    assert [len(part) for part in WMT14(path, "test", 5)[0]] == [80, 2, 2]
    assert len(WMT14(path, "test", 5)) == 1
    assert data.get_dict()[1] == {"<s>": 0, "<e>": 1, "<unk>": 2, "the": 3, "cat": 4}
    assert data.get_dict(reverse=True)[0] == {0: "<s>", 1: "<e>", 2: "<unk>", 3: "le", 4: "chat"}
    with pytest.raises(ConfigError, match="WMT14: dict_size=-1; give how many words"):
        WMT14(path)


def test_wmt16(tmp_path):
    files = {
        "wmt16/train": "a cat sat\teine katze sass\na a  cat\teine eine katze\nno pair\n",
        "wmt16/test": "a dog\tein hund\n",
        "wmt16/val": "cat cat\tkatze katze\n",
    }
    path = tar(tmp_path / "wmt16.tgz", files)
    data = WMT16(path, "train", 5, 6)
    # the sources as PaddlePaddle; its targets are nearly all <unk>, as their dictionary is of the source's language
    assert listed(data)[0] == [[0, 3, 4, 2, 1], [0, 3, 4, 5], [3, 4, 5, 1]]
    assert data.get_dict("en") == {"<s>": 0, "<e>": 1, "<unk>": 2, "a": 3, "cat": 4}
    assert data.get_dict("de", reverse=True) == {0: "<s>", 1: "<e>", 2: "<unk>", 3: "eine", 4: "katze", 5: "sass"}
    assert listed(WMT16(path, "val", 5, 6, "de")) == [[[0, 4, 4, 1], [0, 4, 4], [4, 4, 1]]]
    assert listed(WMT16(path, "test", 100, 100)) == [[[0, 3, 2, 1], [0, 2, 2], [2, 2, 1]]]
    with pytest.raises(ConfigError, match="WMT16: lang='fr'"):
        WMT16(path, "train", 5, 5, "fr")
    with pytest.raises(ConfigError, match=r"WMT16\.get_dict: lang='fr'"):
        data.get_dict("fr")
    with pytest.raises(ConfigError, match="trg_dict_size=-1"):
        WMT16(path, "train", 5)


WORDS = "The\ncat\nsat\non\nmats\n.\n\nDogs\nrun\n\n"
ROLES = "- (A0*\n- *)\nsit (V*)\n- (A1*\n- *)\n- *\n\n- (A0*)\nrun (V*)\n\n"


def conll(folder, words=WORDS, roles=ROLES):
    files = {
        f"conll05st-release/test.wsj/{kind}/test.wsj.{kind}.gz": gzipped(text)
        for kind, text in (("words", words), ("props", roles))
    }
    (folder / "words.txt").write_text("<unk>\nthe\ncat\nsat\non\nbos\neos\nThe\n")
    (folder / "verbs.txt").write_text("sit\nrun\n")
    (folder / "labels.txt").write_text("B-A0\nI-A0\nB-A1\nI-A1\nB-V\nO\n")
    return (tar(folder / "conll.tgz", files), *(folder / f"{n}.txt" for n in ("words", "verbs", "labels")))


def test_conll05st(tmp_path, monkeypatch):
    data = Conll05st(*conll(tmp_path))
    # as PaddlePaddle
    assert listed(data)[0] == [
        [7, 2, 3, 4, 0, 0], [7] * 6, [2] * 6, [3] * 6, [4] * 6, [0] * 6, [0] * 6, [1, 1, 1, 1, 1, 0], [0, 1, 4, 2, 3,
        6],
    ]  # fmt: skip
    assert listed(data)[1] == [[0, 0], [5, 5], [0, 0], [0, 0], [6, 6], [6, 6], [1, 1], [1, 1], [0, 4]]
    assert data.get_dict()[2] == {"B-A0": 0, "I-A0": 1, "B-A1": 2, "I-A1": 3, "B-V": 4, "I-V": 5, "O": 6}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"no emb in .* or give emb_file"):
        data.get_embedding()
    (tmp_path / "emb").write_bytes(b"x")
    assert Conll05st(*conll(tmp_path), tmp_path / "emb").get_embedding() == str(tmp_path / "emb")
    with pytest.raises(DataError, match="has no column of roles for 'sit'"):
        Conll05st(*conll(tmp_path, roles=ROLES.replace("- *)", "-")))
    with pytest.raises(DataError, match="marks no word as the verb 'sit'"):
        Conll05st(*conll(tmp_path, roles=ROLES.replace("(V*)", "*")))
    with pytest.raises(DataError, match="has 'jump', which the dictionary lacks"):
        Conll05st(*conll(tmp_path, roles=ROLES.replace("sit", "jump")))[0]


def test_two_verbs_of_a_sentence(tmp_path):
    """A word may be outside of one verb's roles and inside another's."""
    roles = "- (A0*) *\nsit (V*) *\n- * (A0*\nrun * (V*)\n\n"
    data = Conll05st(*conll(tmp_path, "a\nb\nc\nd\n\n", roles.replace("(A0*\n", "(A0*)\n")))
    assert [data[i][-1].tolist() for i in range(2)] == [[0, 4, 6, 6], [6, 6, 0, 4]]
    assert [data[i][-2].tolist() for i in range(2)] == [[1, 1, 1, 1], [0, 1, 1, 1]]


def test_missing_files_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sized = {"dict_size": 5}
    for make, name, kwargs in (
        (Imdb, "aclImdb_v1.tar.gz", {}),
        (Imikolov, "simple-examples.tgz", {"data_type": "SEQ"}),
        (Movielens, "ml-1m.zip", {}),
        (UCIHousing, "housing.data", {}),
        (WMT14, "wmt14.tgz", sized),
        (WMT16, "wmt16.tar.gz", {"src_dict_size": 5, "trg_dict_size": 5}),
        (Conll05st, "conll05st-tests.tar.gz", {}),
    ):
        with pytest.raises(DataError, match=rf"{make.__name__}: no {name} in .*nothing is downloaded: fetch http.*md5"):
            make(**kwargs)
    with pytest.raises(DataError, match=r"aclImdb/train/pos/\*\.txt"):
        Imdb(tar(tmp_path / "other.tgz", {"a.txt": "x"}))


def test_workers_need_no_jax():
    code = "import sys, polyreme.text; polyreme.text.Imdb; assert 'jax' not in sys.modules, 'jax was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
