"""Writing down what is said in sounds, as text, subtitles or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polyreme.generation.transcriber import Transcriber, Transcription


def run(
    path: Path,
    sounds: Sequence[Path],
    *,
    language: str | None = None,
    task: str | None = None,
    output_format: str = "text",
    dtype: str | None = None,
    settings: Mapping[str, Any],
    say: Callable[[str], None],
) -> None:
    """Say what is said in each WAVE file, by a folder of a Whisper.

    output_format: "text", "srt", "vtt" or "json", a line of each sound. language, task, settings: as of
    Transcriber.transcribe. Raises as that, and as AutoModelForSpeechSeq2Seq.from_pretrained.
    """
    transcriber = Transcriber(path, dtype=dtype)
    for sound in sounds:
        say(_written(transcriber.transcribe(sound, language, task, **settings), sound, output_format))


def _written(said: Transcription, sound: Path, output_format: str) -> str:
    match output_format:
        case "srt":
            return said.srt
        case "vtt":
            return said.vtt
        case "json":
            return json.dumps({"file": str(sound), **asdict(said)}, ensure_ascii=False) + "\n"
    return said.text + "\n"
