"""ESC-50 and TESS from tiny archives made here."""

import hashlib
import pickle
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from polyreme.audio import wave_file
from polyreme.audio.datasets import ESC50, TESS
from polyreme.errors import ConfigError, DataError
from polyreme.io import DataLoader

SOUNDS = np.random.default_rng(6).uniform(-1, 1, (10, 600, 1)).astype("float32")


def archive_of(path, members):
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(name, data)
    return {"url": str(path), "md5": hashlib.md5(path.read_bytes()).hexdigest()}


def waves(folder, names):
    members = {}
    for name, samples in zip(names, SOUNDS, strict=False):
        path = folder / "one.wav"
        wave_file.write(path, samples, 8000, "PCM_F", 32)
        members[name] = path.read_bytes()
    return members


@pytest.fixture
def esc50(tmp_path):
    names = [f"{fold}-{i}-A-{i}.wav" for fold in (1, 2) for i in range(3)]
    rows = [f"{n},{n[0]},{i % 3},x,False,1,A" for i, n in enumerate(names)]
    members = waves(tmp_path, [f"ESC-50-master/audio/{n}" for n in names])
    members["ESC-50-master/meta/esc50.csv"] = "\n".join(["filename,fold,target,category,esc10,src_file,take", *rows])
    return archive_of(tmp_path / "ESC-50-master.zip", members)


def test_folds_of_esc50(esc50):
    dev, train = ESC50("dev", 1, archive=esc50), ESC50("train", 1, archive=esc50)
    assert (len(dev), len(train)) == (3, 3)
    assert [label for _, label in dev] == [0, 1, 2] == [train[i][1] for i in range(3)]
    np.testing.assert_array_equal(dev[2][0], SOUNDS[2, :, 0])
    np.testing.assert_array_equal(train[0][0], SOUNDS[3, :, 0])
    assert len(ESC50.label_list) == 50
    assert ESC50.label_list[49] == "Hand saw"


def test_features_and_workers(esc50):
    from_features = ESC50("dev", 1, "mfcc", esc50, n_fft=64, n_mels=6, n_mfcc=4)
    assert from_features[0][0].shape == (4, 38)
    assert ESC50("dev", 1, "spectrogram", esc50, n_fft=64, hop_length=32)[0][0].shape == (33, 19)
    raw = ESC50("dev", 1, archive=esc50)
    assert raw[0][0].shape == pickle.loads(pickle.dumps(raw))[0][0].shape
    batches = list(DataLoader(raw, batch_size=3, num_workers=1, return_list=True))
    np.testing.assert_array_equal(batches[0][0].numpy(), SOUNDS[:3, :, 0])


def test_folds_of_tess(tmp_path):
    names = [f"OAF_{word}_{emotion}.wav" for word in ("back", "bar") for emotion in ("angry", "fear", "ps")]
    folder = "TESS_Toronto_emotional_speech_set/OAF_x/"
    archive = archive_of(tmp_path / "tess.zip", waves(tmp_path, [folder + n for n in names]))
    dev, train = TESS("dev", 3, 2, archive=archive), TESS("train", 3, 2, archive=archive)
    assert (len(dev), len(train)) == (2, 4)
    assert [TESS.label_list[label] for _, label in dev] == ["fear", "fear"]
    odd = archive_of(tmp_path / "odd.zip", waves(tmp_path, [folder + "OAF_back_glad.wav"]))
    with pytest.raises(DataError, match="ends with 'glad'"):
        TESS(archive=odd)
    with pytest.raises(DataError, match=r"has no \.wav files"):
        TESS(archive=archive_of(tmp_path / "none.zip", {"a.txt": "a"}))


def test_archives_that_cannot_be_used(tmp_path, esc50, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"no ESC-50-master.zip in .*polyreme/datasets/esc50.*nothing is downloaded"):
        ESC50()
    with pytest.raises(DataError, match=r"md5 .* is not 00, that of the archive"):
        ESC50(archive={**esc50, "md5": "00"})
    place = tmp_path / "polyreme" / "datasets" / "esc50"
    place.mkdir(parents=True)
    (place / "ESC-50-master.zip").write_bytes((tmp_path / "ESC-50-master.zip").read_bytes())
    monkeypatch.setattr(ESC50, "archive", {**ESC50.archive, "md5": esc50["md5"]})
    assert len(ESC50()) == 3
    with pytest.raises(DataError, match=r"has no ESC-50-master/meta/esc50\.csv"):
        ESC50(archive=archive_of(tmp_path / "none.zip", {"a.txt": "a"}))
    with pytest.raises(DataError, match="lacks a filename, target or fold"):
        ESC50(archive=archive_of(tmp_path / "odd.zip", {ESC50.meta: "filename\na.wav"}))


def test_settings_that_cannot_be(esc50):
    for bad, match in (
        ({"mode": "test"}, "mode='test'"),
        ({"split": 6}, "split=6 of 5 folds"),
        ({"feat_type": "mel"}, "feat_type='mel'"),
        ({"n_mels": 4}, "n_mels with feat_type='raw'"),
    ):
        with pytest.raises(ConfigError, match=match):
            ESC50(archive=esc50, **bad)


def test_raw_samples_need_no_jax():
    code = "import sys, polyreme.audio.datasets; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
