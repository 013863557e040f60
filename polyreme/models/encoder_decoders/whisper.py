"""Whisper: a sound's mel spectrum read by a BART-like encoder behind two convolutions, a text written of it.

Source: arXiv:2212.04356. Same function as transformers' WhisperForConditionalGeneration; log_mel is that of its
WhisperFeatureExtractor, and the order of times in a text that of its WhisperTimeStampLogitsProcessor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np

from polyreme.audio.functional import compute_fbank_matrix
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.models.encoder_decoders.bart import (
    KEYS,
    READ_KEYS,
    BartConfig,
    BartForConditionalGeneration,
    SequenceStack,
    published_writer,
    stack_rules,
)
from polyreme.models.families import architecture
from polyreme.models.files.published import SAME, WeightRule
from polyreme.models.parts.encoder import key_mask
from polyreme.nn import Conv1D
from polyreme.nn import functional as F
from polyreme.ops.creation import arange
from polyreme.ops.layout import constrain

SAMPLE_RATE, HOP, WINDOW = 16_000, 160, 400
"""Samples a second, from one column of a spectrum to the next, and of the sound that a column is of."""
COLUMNS_PER_TIME = 2
"""From one time that can be written to the next, 20 ms."""
_BLOCK = 4096
"""Columns that are transformed at once, as the windows of a long sound take many times its memory."""


@dataclass(frozen=True)
class WhisperConfig(BartConfig):
    """Dimensions of a Whisper: a BART's, seq_len being the longest text. num_mels: rows of a spectrum. num_places: what
    the encoder makes of one, half as many as it has columns."""

    norm_first: ClassVar[bool] = True
    embedding_norm: ClassVar[bool] = False
    last_norm: ClassVar[bool] = True
    spare_positions: ClassVar[int] = 0
    key_bias: ClassVar[bool] = False
    logit_bias: ClassVar[bool] = False

    vocab_size: int = 51865
    hidden_size: int = 384
    num_layers: int = 4
    num_heads: int = 6
    ffn_size: int = 1536
    seq_len: int = 448
    num_mels: int = 80
    num_places: int = 1500
    start: int = field(default=50257, metadata={"least": 0})
    pad: int = field(default=50256, metadata={"least": 0})
    end: int = field(default=50256, metadata={"least": 0})

    @classmethod
    def nano(cls, **changes: Any) -> WhisperConfig:
        """A Whisper that trains in seconds on a CPU."""
        sizes = {"num_mels": 8, "num_places": 10, "start": 3, "pad": 2, "end": 2}
        return super().nano(**{**sizes, **changes})  # type: ignore[return-value]  # of this class


class TimestampGrammar:
    """A generation.choosing.TokenGrammar of texts with times.

    Ids from `first` on are times, those before are words, but for `end` and what lies between. A text begins with a
    time, the at_most-th of them at the latest where that is not None. Behind words there is one time, where they end;
    behind that another, which does not lie before it, where the next begin, or the end of the text. Where times
    together are likelier than each other token, one of them comes. Source: arXiv:2212.04356, section 4.5.

    >>> text = TimestampGrammar(8, first=5, end=3)
    >>> for token in (5, 0, 6):
    ...     text.take(token)
    >>> text.allowed().nonzero()[0].tolist()
    [3, 6, 7]
    """

    is_done = False

    def __init__(self, vocab_size: int, first: int, end: int, at_most: int | None = None) -> None:
        self.vocab_size, self.group_start, self.end, self.at_most = vocab_size, first, end, at_most
        self._is_first = True
        self._last_time: int | None = None
        self._were_times = (True, True)  # the last two tokens; what stands before a text counts as two

    def allowed(self) -> np.ndarray:
        """The tokens that may come next, bool [vocab]."""
        first, allowed = self.group_start, np.ones(self.vocab_size, bool)
        allowed[first - 1] = False  # which says that there are no times
        if self._is_first:
            allowed[:first] = False
            if self.at_most is not None:
                allowed[first + self.at_most + 1 :] = False
            return allowed
        is_end_of_words = self._were_times == (False, True)
        if self._last_time is not None:
            allowed[first : self._last_time + (not is_end_of_words)] = False
        if is_end_of_words:
            allowed[: self.end] = False
        elif self._were_times[1]:
            allowed[first:] = False
        return allowed

    def take(self, token: int) -> None:
        """Go on by a token of those."""
        is_time, self._is_first = token >= self.group_start, False
        self._were_times = (self._were_times[1], is_time)
        self._last_time = token if is_time else self._last_time

    def copy(self) -> TimestampGrammar:
        """The same for another text, from here on."""
        return copy.copy(self)


class SpeechSegment(NamedTuple):
    """What is said from one time to another, in seconds: tokens, those of the times among them."""

    start: float
    end: float
    token_ids: list[int]


class HeardWindow(NamedTuple):
    """The segments of one window of a sound; language: the name, in generation_config.json, of that in which it was
    read, or as it was asked for, None of a model of one; score: the mean log-probability of what was written."""

    segments: list[SpeechSegment]
    language: str | None
    score: float


class WhisperEncoder(SequenceStack):
    """Two convolutions, the second of which halves the columns, before the blocks."""

    conv1: Conv1D
    conv2: Conv1D

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__(config, is_decoder=False, seq_len=config.num_places)
        self.conv1 = Conv1D(config.num_mels, config.hidden_size, 3, padding=1)
        self.conv2 = Conv1D(config.hidden_size, config.hidden_size, 3, stride=2, padding=1)

    def read(self, features: Any) -> Any:
        """[batch, num_places, embed] of spectra [batch, num_mels, 2 * num_places]."""
        x = F.gelu(self.conv2(F.gelu(self.conv1(features)))).transpose([0, 2, 1])
        return self(constrain(x, "batch", "seq", "embed"), arange(x.shape[1], dtype="int32"))


class WhisperForConditionalGeneration(BartForConditionalGeneration):
    """Spectra [batch, num_mels, 2 * num_places] and token ids that are written [batch, s] -> logits [batch, s, vocab].

    decoder_input_ids, labels: as of BartForConditionalGeneration.

    >>> from polyreme.eager.tensor import to_tensor
    >>> model = WhisperForConditionalGeneration(WhisperConfig.nano())
    >>> model(to_tensor(np.zeros((1, 8, 20), "float32")), decoder_input_ids=to_tensor([[3, 8]])).shape
    paddle.Size([1, 2, 128])
    """

    reads_ids = False
    family: Any = architecture("whisper", "speech_seq2seq")

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__(config)
        self.most_inputs = config.num_places

    def make_encoder(self, config: Any) -> WhisperEncoder:
        """A new encoder."""
        return WhisperEncoder(config)

    def forward(  # type: ignore[override]  # of sounds
        self,
        input_features: Any,
        decoder_input_ids: Any = None,
        decoder_attention_mask: Any = None,
        labels: Any = None,
    ) -> Any:
        if decoder_input_ids is None and labels is None:
            raise ConfigError("Whisper: neither decoder_input_ids nor labels; give what is written, or its beginning")
        ids = self.shifted(labels) if decoder_input_ids is None else decoder_input_ids
        mask = key_mask("Whisper", decoder_attention_mask, ids.shape)
        hidden = self.decode(ids, mask, self.encode(input_features, None), None)
        logits = self.project(hidden)
        return logits if labels is None else F.cross_entropy(logits, labels, ignore_index=-100)

    def encode(self, inputs: Any, mask: Any) -> Any:
        """What is read of spectra; all of it is seen. Raises ShapeError for others than the model's."""
        want = [self.config.num_mels, 2 * self.config.num_places]
        if [*inputs.shape[1:]] != want:
            raise ShapeError(
                f"Whisper: input_features have shape {list(inputs.shape)}; give [batch, {want[0]}, {want[1]}], as "
                "models.encoder_decoders.whisper.log_mel does of sounds padded to that length"
            )
        return self.encoder.read(inputs.astype(self.tokens.weight.dtype))

    def num_places(self, one: Any) -> int:
        """Places of one spectrum."""
        return self.config.num_places

    def check_input(self, one: Any, whose: str) -> None:
        """Raises ConfigError for what is no spectrum."""
        want = (self.config.num_mels, 2 * self.config.num_places)
        if np.shape(one) != want:
            raise ConfigError(f"{whose} has shape {[*np.shape(one)]}; give a spectrum {[*want]}, as of log_mel")

    def packed(self, inputs: Sequence[Any], t: int) -> tuple[np.ndarray, np.ndarray]:
        """Spectra as one array."""
        return np.stack([np.asarray(one, np.float32) for one in inputs]), np.ones((len(inputs), t), np.int64)

    def generate(  # type: ignore[override]  # of sounds
        self,
        input_features: Any,
        language: str | None = None,
        task: str | None = None,
        max_new_tokens: int | None = None,
        return_timestamps: bool = False,
        **settings: Any,
    ) -> tuple[Any, Any]:
        """Write what is said in spectra [batch, num_mels, 2 * num_places] -> ids, int64 [batch, longest], without
        language and task, and scores.

        language, task: of a model of several languages, as "en" or "<|en|>", and "transcribe" or "translate" (into
        English); the likeliest language and the first task if None. max_new_tokens: as many as there are places for if
        None. return_timestamps: with the times at which words begin and end, as TimestampGrammar has them. settings:
        others of generation.strategies.generate. Raises ConfigError for a language or task that generation_config.json
        does not name, for either of a model of one language, and for times of a model without.
        """
        rows = np.asarray(input_features.numpy() if hasattr(input_features, "numpy") else input_features)
        forced = self.beginnings(rows, language, task, return_timestamps)
        first = len(forced[0])
        most = self.config.seq_len if max_new_tokens is None else max_new_tokens + first
        if return_timestamps:
            at_most = self.generation_config.get("max_initial_timestamp_index")
            times = TimestampGrammar(self.config.vocab_size, self.first_timestamp, self.config.end, at_most)
            settings["grammar"] = times
        ids, scores = super().generate([*rows], forced=forced, max_new_tokens=most, **settings)
        return ids[:, first:], scores

    @property
    def first_timestamp(self) -> int:
        """The id of the time 0. Raises ConfigError for a model without times."""
        untimed = self.generation_config.get("no_timestamps_token_id")
        if untimed is None:
            raise ConfigError(
                "Whisper: generation_config.json has no no_timestamps_token_id, behind which times come; leave times "
                "out, or set it in model.generation_config"
            )
        return untimed + 1

    def transcribe(
        self,
        features: np.ndarray,
        num_columns: int | None = None,
        language: str | None = None,
        task: str | None = None,
        **settings: Any,
    ) -> list[SpeechSegment]:
        """What is said in a spectrum [num_mels, columns] of any length, by segments in order.

        It is read by windows of 2 * num_places columns, of which the next begins where the last whole segment of one
        ends. num_columns: those that are of the sound; behind them may be silence for the last window. language: that
        of the first window for all if None. task, settings: as of generate. Raises as generate with times.
        """
        windows = self.transcribed(features, num_columns, language, task, **settings)
        return [segment for window in windows for segment in window.segments]

    def transcribed(
        self,
        features: np.ndarray,
        num_columns: int | None = None,
        language: str | None = None,
        task: str | None = None,
        **settings: Any,
    ) -> Iterator[HeardWindow]:
        """What `transcribe` gives, window by window, each computed when it is asked for."""
        features = np.asarray(features, np.float32)
        window, first = 2 * self.config.num_places, self.first_timestamp
        end: int = features.shape[1] if num_columns is None else num_columns
        features = np.pad(features, ((0, 0), (0, max(0, end + window - features.shape[1]))))
        languages = {ident: name for name, ident in (self.generation_config.get("lang_to_id") or {}).items()}
        place = 0
        while place < end:
            one = features[None, :, place : place + window]
            if language is None and languages:
                language = languages[self.beginnings(one, None, task)[0][0]]
            ids, scores = self.generate(one, language, task, return_timestamps=True, **settings)
            tokens = ids.numpy()[0].tolist()
            tokens = tokens[: tokens.index(self.config.end)] if self.config.end in tokens else tokens
            read, passed = split_at_times(tokens, first, min(window, end - place))
            offset = place * HOP / SAMPLE_RATE
            moved = [segment._replace(start=segment.start + offset, end=segment.end + offset) for segment in read]
            yield HeardWindow(moved, language, float(scores.numpy()[0, 0]))
            place += passed

    def beginnings(
        self, features: np.ndarray, language: str | None, task: str | None, has_times: bool = False
    ) -> list[list[int]]:
        """What each text begins with after config.start: language, task, and, unless it has_times, that there are
        none."""
        said = self.generation_config
        languages, tasks = said.get("lang_to_id") or {}, said.get("task_to_id") or {}
        for name, value, known in (("language", language, languages), ("task", task, tasks)):
            if value is not None and not {value, f"<|{value}|>"} & known.keys():
                raise ConfigError(
                    f"generate: {name}={value!r} is not among those of generation_config.json: "
                    f"{', '.join(known) or 'none, as of models of one language'}"
                )
        first: list[list[int]] = [[] for _ in features]
        if languages:
            named = next((languages[key] for key in (language, f"<|{language}|>") if key in languages), None)
            first = [[named]] * len(first) if named is not None else self._languages(features, [*languages.values()])
        more = [tasks[task or "transcribe"]] if tasks else []
        untimed = None if has_times else said.get("no_timestamps_token_id")
        return [[*one, *more, *([] if untimed is None else [untimed])] for one in first]

    def _languages(self, features: np.ndarray, ids: list[int]) -> list[list[int]]:
        """The likeliest of languages, by the ids of their tokens, of each spectrum."""
        start = np.full((len(features), 1), self.config.start)
        logits = self(to_tensor(features), decoder_input_ids=to_tensor(start)).numpy()[:, -1]
        return [[ids[number]] for number in logits[:, ids].argmax(-1)]

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray | None, ...]:
        """What a call takes, made up: a spectrum and what is written."""
        sizes = (1, self.config.num_mels, 2 * self.config.num_places)
        return rng.standard_normal(sizes, "float32"), rng.integers(0, self.config.vocab_size, (1, length))


def split_at_times(tokens: Sequence[int], first: int, columns: int) -> tuple[list[SpeechSegment], int]:
    """The segments of what is written of a window, and how many of its columns they are of.

    A segment ends between two times. What is behind the last such place is cut off by the window's end, and for the
    next window, unless it ends with a time of its own, behind which nothing is said. first: the id of the time 0.
    columns: of the window, the sound's.

    >>> split_at_times([50, 7, 60, 60, 8], first=50, columns=3000)
    ([SpeechSegment(start=0.0, end=0.2, token_ids=[50, 7, 60])], 20)
    """
    seconds = COLUMNS_PER_TIME * HOP / SAMPLE_RATE
    is_time = [token >= first for token in tokens]
    cuts = [place for place in range(1, len(tokens)) if is_time[place - 1] and is_time[place]]
    is_whole = is_time[-2:] == [False, True]
    if not cuts:
        times = [token - first for token in tokens if token >= first]
        last = times[-1] if times and times[-1] else columns // COLUMNS_PER_TIME
        return [SpeechSegment(0.0, last * seconds, [*tokens])], columns
    passed = columns if is_whole else (tokens[cuts[-1] - 1] - first) * COLUMNS_PER_TIME
    bounds = [0, *cuts, *([len(tokens)] if is_whole else [])]
    parts = [tokens[begin:end] for begin, end in pairwise(bounds)]
    return [SpeechSegment((part[0] - first) * seconds, (part[-1] - first) * seconds, [*part]) for part in parts], passed


def log_mel(samples: np.ndarray, num_mels: int = 80, columns: int = 3000) -> np.ndarray:
    """The spectrum that Whisper reads of a sound, float32 [num_mels, columns], a hundred columns a second.

    samples: [n], 16,000 a second, from -1 to 1; what is too long is cut off, and what is too short filled up by
    silence. Raises ShapeError for another number of dims.

    >>> log_mel(np.zeros(16_000), columns=200).shape
    (80, 200)
    """
    samples = np.asarray(samples, np.float64)
    if samples.ndim != 1:
        raise ShapeError(f"log_mel: samples have shape {list(samples.shape)}; give [n], of one channel")
    length = columns * HOP
    samples = np.pad(samples[:length], (0, max(0, length - len(samples))))
    padded = np.pad(samples, WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:columns]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    filters = compute_fbank_matrix(SAMPLE_RATE, WINDOW, num_mels, dtype="float64").numpy()
    power = np.empty((num_mels, columns))
    for first in range(0, columns, _BLOCK):
        block = frames[first : first + _BLOCK] * window
        power[:, first : first + _BLOCK] = filters @ (np.abs(np.fft.rfft(block)) ** 2).T
    logs = np.log10(np.maximum(power, 1e-10))
    return ((np.maximum(logs, logs.max() - 8) + 4) / 4).astype(np.float32)


# as published


def _rules(config: Any) -> list[WeightRule]:
    convolutions = [f"conv{number}" for number in (1, 2)]
    return [
        WeightRule("model.decoder.embed_tokens.weight", "tokens.weight", SAME),
        *(
            WeightRule(f"model.encoder.{name}.{kind}", f"encoder.{name}.{kind}", SAME)
            for name in convolutions
            for kind in ("weight", "bias")
        ),
        *stack_rules("encoder"),
        *stack_rules("decoder"),
    ]


_MASKING = tuple(f"mask_{axis}_{what}" for axis in ("time", "feature") for what in ("prob", "length", "min_masks"))
_KEYS = {key: ours for key, ours in KEYS.items() if key != "max_position_embeddings"}

PUBLISHED_SPEECH_SEQ2SEQ = published_writer(
    {
        **_KEYS,
        "num_mel_bins": "num_mels",
        "max_source_positions": "num_places",
        "max_target_positions": "seq_len",
    },
    architecture="WhisperForConditionalGeneration",
    model_type="whisper",
    weights=_rules,
    heads=("proj_out.",),
    spare=lambda name, config: name == "proj_out.weight",
    defaults={
        "decoder_start_token_id": 50257,
        "pad_token_id": 50256,
        "eos_token_id": 50256,
        "max_source_positions": 1500,
        "max_target_positions": 448,
    },
    read_keys=(
        *READ_KEYS,
        *_MASKING,
        # of a classifier, of times of words, of how texts are chosen
        *("classifier_proj_size", "use_weighted_layer_sum", "median_filter_width", "apply_spec_augment"),
        *("begin_suppress_tokens", "suppress_tokens", "forced_decoder_ids", "max_length"),
    ),
)
