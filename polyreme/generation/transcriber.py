"""What is said in a sound, as text with times."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.audio.wave_file import read
from polyreme.errors import ConfigError
from polyreme.generation.tokenizer import AutoTokenizer, TextTokenizer
from polyreme.models.auto import AutoModelForSpeechSeq2Seq
from polyreme.models.encoder_decoders.whisper import HOP, SAMPLE_RATE, WhisperForConditionalGeneration, log_mel


@dataclass(frozen=True)
class SpeechText:
    """What is said from one time to another, in seconds."""

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Transcription:
    """What is said in a sound, whole and by segments."""

    text: str
    segments: tuple[SpeechText, ...]


class Transcriber:
    """A Whisper and its tokenizer: sounds of any length in, text with times out.

    model: a folder of published weights, or a model, which needs a tokenizer. options: as of
    AutoModelForSpeechSeq2Seq.from_pretrained.
    """

    model: WhisperForConditionalGeneration
    tokenizer: TextTokenizer

    def __init__(self, model: Any, tokenizer: TextTokenizer | str | Path | None = None, **options: Any) -> None:
        is_path = isinstance(model, (str, Path))
        if not is_path and (options or not isinstance(tokenizer, TextTokenizer)):
            raise ConfigError("Transcriber: a model without a path needs a tokenizer, and takes no options")
        self.model = AutoModelForSpeechSeq2Seq.from_pretrained(model, **options) if is_path else model
        named = model if tokenizer is None else tokenizer
        self.tokenizer = named if isinstance(named, TextTokenizer) else AutoTokenizer.from_pretrained(named)

    def transcribe(
        self, sound: str | Path | np.ndarray, language: str | None = None, task: str | None = None, **settings: Any
    ) -> Transcription:
        """The text of a sound: a WAVE file, or samples [n]; 16,000 a second both, channels of a file are averaged.

        language, task, settings: as of WhisperForConditionalGeneration.transcribe. Raises as that, ConfigError for a
        file of another rate, DataError for one that is no WAVE file, ShapeError for samples of several channels.
        """
        samples = _read_samples(sound) if isinstance(sound, (str, Path)) else np.asarray(sound)
        config = self.model.config
        columns = -(-samples.shape[0] // HOP)
        # behind a sound comes silence, for the last window
        features = log_mel(samples, config.num_mels, columns + 2 * config.num_places)
        first = self.model.first_timestamp
        segments = []
        for segment in self.model.transcribe(features, columns, language, task, **settings):
            words = tuple(token for token in segment.token_ids if token < first)
            segments.append(SpeechText(segment.start, segment.end, self.tokenizer.decode(words), words))
        return Transcription("".join(segment.text for segment in segments).strip(), tuple(segments))


def _read_samples(path: str | Path) -> np.ndarray:
    samples, rate = read(path)
    if rate != SAMPLE_RATE:
        raise ConfigError(f"{path}: {rate} samples a second; convert it to {SAMPLE_RATE}")
    return samples.mean(1)
