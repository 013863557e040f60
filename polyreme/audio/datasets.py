"""ESC-50 and TESS from local archives."""

from __future__ import annotations

import csv
import hashlib
import importlib
import io as streams
import os
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from polyreme.audio import wave_file
from polyreme.errors import ConfigError, DataError
from polyreme.io.archives import open_zip, readable
from polyreme.io.dataset import Dataset
from polyreme.io.worker_info import get_worker_info

# feature type -> the Layer that makes it, and whether that takes the sample rate
_FEATURES = {
    "raw": None,
    "spectrogram": ("Spectrogram", False),
    "melspectrogram": ("MelSpectrogram", True),
    "logmelspectrogram": ("LogMelSpectrogram", True),
    "mfcc": ("MFCC", True),
}


class SoundArchive(Dataset):
    """(sound, label) of WAVE files in a zip archive, in folds: mode "dev" has the fold `split`, "train" the others.

    A sound is a float32 ndarray [samples], or with another feat_type ("spectrogram", "melspectrogram",
    "logmelspectrogram", "mfcc") that feature of it, kwargs being the feature Layer's; labels are indices into
    label_list. Features are for a DataLoader without workers: with them, read raw samples and put the Layer in the
    model. The archive is looked for in folders(); archive={"url": path or file name, "md5": digest} names another one.
    Nothing is downloaded: DataError says what to put where.
    """

    feat_type: str
    samples: list[tuple[str, int]]

    NAME: ClassVar[str]
    archive: ClassVar[dict[str, str]]
    label_list: ClassVar[list[str]]
    audio_path: ClassVar[str]

    def __init__(
        self,
        mode: str,
        split: int,
        n_folds: int,
        feat_type: str,
        archive: dict[str, str] | None,
        kwargs: dict[str, Any],
    ) -> None:
        what = type(self).__name__
        if mode not in ("train", "dev"):
            raise ConfigError(f"{what}: mode={mode!r}; give 'train' or 'dev'")
        if not isinstance(n_folds, int) or not isinstance(split, int) or not 1 <= split <= n_folds:
            raise ConfigError(f"{what}: split={split!r} of {n_folds!r} folds; give one of 1 to {n_folds}")
        if feat_type not in _FEATURES:
            raise ConfigError(f"{what}: feat_type={feat_type!r}; choose one of {', '.join(_FEATURES)}")
        if feat_type == "raw" and kwargs:
            raise ConfigError(
                f"{what}: {', '.join(kwargs)} with feat_type='raw', which has no settings; leave them out"
            )
        self.mode, self.feat_type, self._settings = mode, feat_type, kwargs
        self.path = self._find(self.archive if archive is None else archive)
        self._open_in: dict[int, zipfile.ZipFile] = {}
        self._layers: dict[int, Any] = {}
        every = self._listed(n_folds)
        self.samples = [(name, label) for name, label, fold in every if (fold == split) is (mode == "dev")]

    def _listed(self, n_folds: int) -> list[tuple[str, int, int]]:
        """(member of the archive, label, fold from 1) of every sound."""
        raise NotImplementedError

    @classmethod
    def folders(cls) -> list[Path]:
        """Where archives are looked for, in this order."""
        home = os.environ.get("XDG_CACHE_HOME")
        cache = Path(home) if home else Path.home() / ".cache"
        return [cache / "polyreme" / "datasets" / cls.NAME, Path("/usr/share/datasets") / cls.NAME]

    def _find(self, wanted: dict[str, str]) -> Path:
        named = Path(wanted["url"])
        places = [named, *(folder / named.name for folder in self.folders())]
        path = next((p for p in places if p.is_file()), None)
        if path is None:
            raise DataError(
                f"{type(self).__name__}: no {named.name} in {' or '.join(map(str, self.folders()))}; nothing is "
                f"downloaded: put the archive (published at {self.archive['url']}) there, or give archive="
                "{'url': path, 'md5': digest}"
            )
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "md5").hexdigest()
        if digest != wanted["md5"]:
            raise DataError(f"{path}: md5 {digest} is not {wanted['md5']}, that of the archive; fetch it again")
        return path

    def _member(self, name: str) -> bytes:
        # an open archive is a position in a file, which processes must not share
        process = os.getpid()
        if process not in self._open_in:
            self._open_in[process] = open_zip(self.path)
        try:
            with readable(self.path):
                return self._open_in[process].read(name)
        except KeyError:
            raise DataError(f"{self.path}: has no {name}; it is not the archive of {type(self).__name__}") from None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_in": {}}

    def _feature(self, samples: np.ndarray, rate: int) -> np.ndarray:
        if self.feat_type == "raw":
            return samples
        if get_worker_info() is not None:
            raise ConfigError(
                f"{type(self).__name__}: feat_type={self.feat_type!r} in a DataLoader worker, which has no device; use "
                "num_workers=0, or feat_type='raw' and the Layer of audio.features in the model"
            )
        name, wants_rate = _FEATURES[self.feat_type]
        if rate not in self._layers:
            rates = {"sr": rate} if wants_rate else {}
            features = importlib.import_module("polyreme.audio.features")
            self._layers[rate] = getattr(features, name)(**rates, **self._settings)
        tensors = importlib.import_module("polyreme.eager.tensor")
        return self._layers[rate](tensors.to_tensor(samples)).numpy()

    def __getitem__(self, idx: int) -> tuple[np.ndarray, int]:
        name, label = self.samples[idx]
        buffer = streams.BytesIO(self._member(name))
        buffer.name = name
        samples, rate = wave_file.read(buffer)
        return self._feature(samples[:, 0] if samples.shape[1] == 1 else samples.T, rate), label

    def __len__(self) -> int:
        return len(self.samples)


class ESC50(SoundArchive):
    """2,000 recordings of 5 s at 44,100 Hz, 40 of each of 50 kinds of sound, in 5 folds; see SoundArchive.

    Source: K. J. Piczak, "ESC: Dataset for Environmental Sound Classification", ACM Multimedia 2015.
    """

    NAME: ClassVar[str] = "esc50"
    archive: ClassVar[dict[str, str]] = {
        "url": "https://paddleaudio.bj.bcebos.com/datasets/ESC-50-master.zip",
        "md5": "7771e4b9d86d0945acce719c7a59305a",
    }
    label_list: ClassVar[list[str]] = [
        "Dog", "Rooster", "Pig", "Cow", "Frog", "Cat", "Hen", "Insects (flying)", "Sheep", "Crow", "Rain",
        "Sea waves", "Crackling fire", "Crickets", "Chirping birds", "Water drops", "Wind", "Pouring water",
        "Toilet flush", "Thunderstorm", "Crying baby", "Sneezing", "Clapping", "Breathing", "Coughing", "Footsteps",
        "Laughing", "Brushing teeth", "Snoring", "Drinking, sipping", "Door knock", "Mouse click", "Keyboard typing",
        "Door, wood creaks", "Can opening", "Washing machine", "Vacuum cleaner", "Clock alarm", "Clock tick",
        "Glass breaking", "Helicopter", "Chainsaw", "Siren", "Car horn", "Engine", "Train", "Church bells",
        "Airplane", "Fireworks", "Hand saw",
    ]  # fmt: skip
    meta: ClassVar[str] = "ESC-50-master/meta/esc50.csv"
    audio_path: ClassVar[str] = "ESC-50-master/audio"

    def __init__(
        self,
        mode: str = "train",
        split: int = 1,
        feat_type: str = "raw",
        archive: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(mode, split, 5, feat_type, archive, kwargs)

    def _listed(self, n_folds: int) -> list[tuple[str, int, int]]:
        rows = csv.DictReader(self._member(self.meta).decode().splitlines())
        try:
            return [(f"{self.audio_path}/{r['filename']}", int(r["target"]), int(r["fold"])) for r in rows]
        except (KeyError, ValueError) as error:
            raise DataError(f"{self.path}: {self.meta} lacks a filename, target or fold: {error}") from error


class TESS(SoundArchive):
    """2,800 spoken phrases, 200 words by two speakers in seven emotions; see SoundArchive.

    Files, sorted by name, go round the n_folds folds. Source: M. K. Pichora-Fuller and K. Dupuis, "Toronto emotional
    speech set", 2020, doi:10.5683/SP2/E8H2MF.
    """

    NAME: ClassVar[str] = "tess"
    archive: ClassVar[dict[str, str]] = {
        "url": "https://bj.bcebos.com/paddleaudio/datasets/TESS_Toronto_emotional_speech_set.zip",
        "md5": "1465311b24d1de704c4c63e4ccc470c7",
    }
    label_list: ClassVar[list[str]] = ["angry", "disgust", "fear", "happy", "neutral", "ps", "sad"]
    audio_path: ClassVar[str] = "TESS_Toronto_emotional_speech_set"

    def __init__(
        self,
        mode: str = "train",
        n_folds: int = 5,
        split: int = 1,
        feat_type: str = "raw",
        archive: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(mode, split, n_folds, feat_type, archive, kwargs)

    def _listed(self, n_folds: int) -> list[tuple[str, int, int]]:
        with open_zip(self.path) as archive:
            names = sorted(
                n for n in archive.namelist() if n.startswith(self.audio_path) and n.lower().endswith(".wav")
            )
        listed = []
        for index, name in enumerate(names):
            # OAF_back_angry.wav: speaker, word, emotion
            emotion = Path(name).stem.rsplit("_", 1)[-1].lower()
            if emotion not in self.label_list:
                raise DataError(f"{self.path}: {name} ends with {emotion!r}, not one of {', '.join(self.label_list)}")
            listed.append((name, self.label_list.index(emotion), index % n_folds + 1))
        if not listed:
            raise DataError(f"{self.path}: has no .wav files in {self.audio_path}; it is not the archive of TESS")
        return listed


__all__ = ["ESC50", "TESS"]
