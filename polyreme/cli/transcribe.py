"""`polyreme transcribe`: what is said in a sound."""

import math
from pathlib import Path
from typing import Annotated

import typer

from polyreme.errors import ConfigError

FORMATS = ("text", "srt", "vtt", "json")


def transcribe(
    weights: Annotated[str, typer.Argument(metavar="FOLDER", help="Published weights of a Whisper.")],
    sounds: Annotated[list[Path], typer.Argument(metavar="SOUND...", help="WAVE files.")],
    language: Annotated[
        str | None, typer.Option(help="That is spoken, as en; what the model hears if left out.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="transcribe, or translate into English.")] = None,
    output_format: Annotated[str, typer.Option("--format", help="text, srt, vtt, or json with times.")] = "text",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same text.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
) -> None:
    """Write down what is said in sounds, one after the other.

    Example: polyreme transcribe whisper-tiny/ talk.wav --format srt
    """
    if output_format not in FORMATS:
        raise ConfigError(f"--format {output_format}: give {', '.join(FORMATS)}")
    if not math.isfinite(temperature):
        raise ConfigError(f"--temperature {temperature}: needs a number of at least 0")
    from polyreme.models.files import packages
    from polyreme.recipes.inference import transcribe as recipe

    settings = {"do_sample": True, "temperature": temperature, "seed": seed} if temperature else {}
    recipe.run(
        packages.resolve(weights), sounds, language=language, task=task, output_format=output_format, dtype=dtype,
        settings=settings, say=lambda text: typer.echo(text, nl=False),
    )  # fmt: skip
