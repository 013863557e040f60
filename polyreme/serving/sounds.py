"""Sounds over HTTP, as OpenAI's API has them: forms with a file in, text with times out."""

from __future__ import annotations

import io
import secrets
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, ValidationError

from polyreme.generation.transcriber import SpeechText, Transcription
from polyreme.serving.form import read_form
from polyreme.serving.refusals import HttpRefusal
from polyreme.serving.requests import Strict, accept_only, refusal_of


def _number(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _flag(value: Any) -> Any:
    return {"true": True, "false": False}.get(value, value)


def _granularities(value: Any) -> list[str]:
    if not set(value) <= {"segment"}:
        raise ValueError("times of segments alone are computed; give segment, or leave it out")
    return value


class TranslationBody(Strict):
    """POST /v1/audio/translations: what is said in a WAVE file, in English."""

    file: bytes
    model: str | None = None
    prompt: Annotated[Any, PlainValidator(accept_only(""))] = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, BeforeValidator(_whole), Field(ge=0, lt=2**63)] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """How text is chosen, as of model.generate; without a seed, one is drawn."""
        if not self.temperature:
            return {}
        seed = secrets.randbits(31) if self.seed is None else self.seed
        return {"do_sample": True, "temperature": self.temperature, "seed": seed}

    @property
    def sound(self) -> io.BytesIO:
        """The file, by a name for messages."""
        file = io.BytesIO(self.file)
        file.name = "file"
        return file


class TranscriptionBody(TranslationBody):
    """POST /v1/audio/transcriptions: what is said in a WAVE file, in its language."""

    language: Annotated[str, Field(max_length=40)] | None = None
    granularities: Annotated[
        list[str], PlainValidator(_granularities), Field(default_factory=list, alias="timestamp_granularities[]")
    ]
    stream: Annotated[Any, BeforeValidator(_flag), PlainValidator(accept_only(False))] = None
    include: Annotated[Any, PlainValidator(accept_only()), Field(alias="include[]")] = None
    chunking_strategy: Annotated[Any, PlainValidator(accept_only("auto"))] = None


def read_sound_body(kind: type[TranslationBody], content_type: str, body: bytes) -> Any:
    """A form of this kind. Raises HttpRefusal 400 that names the field, 415 for another kind of body."""
    try:
        read = kind.model_validate(read_form(content_type, body))
    except ValidationError as error:
        raise refusal_of(kind, error) from None
    granularities = getattr(read, "granularities", ())
    if granularities and read.response_format != "verbose_json":
        name = "timestamp_granularities[]"
        raise HttpRefusal(400, f"{name}: only with response_format verbose_json", param=name, code="invalid_value")
    return read


def written(said: Transcription, body: TranslationBody) -> str | dict[str, Any]:
    """The answer in the form that is asked for: a text, or what is to be JSON."""
    usage = {"type": "duration", "seconds": said.duration}
    match body.response_format:
        case "text":
            return said.text + "\n"
        case "srt":
            return said.srt
        case "vtt":
            return said.vtt
        case "json":
            return {"text": said.text, "usage": usage}
    segments = [_segment(number, part, body.temperature) for number, part in enumerate(said.segments)]
    return {
        "task": "transcribe" if isinstance(body, TranscriptionBody) else "translate",
        "language": said.language,
        "duration": said.duration,
        "text": said.text,
        "segments": segments,
        "usage": usage,
    }


def _segment(number: int, part: SpeechText, temperature: float) -> dict[str, Any]:
    return {
        "id": number,
        "seek": 0,
        "start": part.start,
        "end": part.end,
        "text": part.text,
        "tokens": list(part.token_ids),
        "temperature": temperature,
        "avg_logprob": part.logprob,
        "compression_ratio": part.compression_ratio,
        "no_speech_prob": None,
    }
