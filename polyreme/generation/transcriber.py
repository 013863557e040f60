"""What is said in a sound, as text with times."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from polyreme.audio.resample import resampled
from polyreme.audio.wave_file import read
from polyreme.errors import ConfigError, ShapeError
from polyreme.generation.tokenizer import AutoTokenizer, TextTokenizer
from polyreme.models.auto import AutoModelForSpeechSeq2Seq
from polyreme.models.encoder_decoders.whisper import HOP, SAMPLE_RATE, WhisperForConditionalGeneration, log_mel


@dataclass(frozen=True)
class SpeechText:
    """What is said from one time to another, in seconds; logprob: the mean log-probability of a token of the window
    that it is of."""

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]
    logprob: float

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text to those that zlib makes of it: high where words repeat."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))


@dataclass(frozen=True)
class SpeechWindow:
    """The segments of one window of a sound, and the language that it was read in, None of a model of one language."""

    segments: tuple[SpeechText, ...]
    language: str | None


@dataclass(frozen=True)
class Transcription:
    """What is said in a sound, whole and by segments; language: "en", None of a model of one language; duration: of the
    sound, in seconds."""

    text: str
    segments: tuple[SpeechText, ...]
    language: str | None
    duration: float

    @property
    def srt(self) -> str:
        """The segments as subtitles of SubRip."""
        parts = enumerate(self.segments, 1)
        return "".join(f"{number}\n{_span(part, ',')}\n{part.text.strip()}\n\n" for number, part in parts)

    @property
    def vtt(self) -> str:
        """The segments as WebVTT."""
        return "WEBVTT\n\n" + "".join(f"{_span(part, '.')}\n{part.text.strip()}\n\n" for part in self.segments)


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
        """The text of a sound: a WAVE file, of any rate, or samples [n], 16,000 a second. Channels of a file are
        averaged.

        language, task, settings: as of WhisperForConditionalGeneration.transcribe. Raises as that, DataError for a file
        that is no WAVE file, ShapeError for samples of several channels.
        """
        samples = read_sound(sound) if isinstance(sound, (str, Path)) else np.asarray(sound)
        return joined([*self.windows(samples, language, task, **settings)], samples)

    def windows(
        self, samples: np.ndarray, language: str | None = None, task: str | None = None, **settings: Any
    ) -> Iterator[SpeechWindow]:
        """What `transcribe` gives of samples [n], window by window, each computed when it is asked for."""
        if samples.ndim != 1:
            raise ShapeError(f"Transcriber: samples have shape {list(samples.shape)}; give [n], of one channel")
        config = self.model.config
        columns = -(-samples.shape[0] // HOP)
        # behind a sound comes silence, for the last window
        features = log_mel(samples, config.num_mels, columns + 2 * config.num_places)
        first = self.model.first_timestamp
        for window in self.model.transcribed(features, columns, language, task, **settings):
            segments = []
            for segment in window.segments:
                words = tuple(token for token in segment.token_ids if token < first)
                text = self.tokenizer.decode(words)
                segments.append(SpeechText(segment.start, segment.end, text, words, window.score))
            yield SpeechWindow(tuple(segments), window.language and window.language.strip("<|>"))


def joined(windows: list[SpeechWindow], samples: np.ndarray) -> Transcription:
    """The windows of a sound as one text; its language is that of the first."""
    segments = tuple(segment for window in windows for segment in window.segments)
    language = windows[0].language if windows else None
    duration = len(samples) / SAMPLE_RATE
    return Transcription("".join(segment.text for segment in segments).strip(), segments, language, duration)


def read_sound(file: str | Path | BinaryIO, most_seconds: float | None = None) -> np.ndarray:
    """The samples of a WAVE file, [n], 16,000 a second, its channels averaged. Raises DataError for another file,
    ConfigError for a rate outside of audio.resample.RATES, and for a sound of more than most_seconds."""
    samples, rate = read(file)
    if most_seconds is not None and len(samples) > most_seconds * rate:
        raise ConfigError(f"a sound of {len(samples)} samples, {rate} a second; give up to {most_seconds:g} seconds")
    return resampled(samples.mean(1), rate, SAMPLE_RATE)


def _span(segment: SpeechText, point: str) -> str:
    return f"{_clock(segment.start, point)} --> {_clock(segment.end, point)}"


def _clock(seconds: float, point: str) -> str:
    """01:02:03.450, with this decimal point."""
    milliseconds = round(1000 * seconds)
    minutes, left = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{left // 1000:02}{point}{left % 1000:03}"
