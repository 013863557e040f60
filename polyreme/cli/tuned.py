"""`polyreme merge` and `polyreme chat`: what fine-tuning trained in a folder of weights, and talked to."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def merge(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|ADAPTER", help="Output folder of a fine-tuning run, or an adapter's folder.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder, which appears when it is whole.")],
    base: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="The weights it began with, if they lie elsewhere now.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; as the base has it.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest safetensors file.")] = "5GB",
) -> None:
    """Write the model that fine-tuning made as a folder of published weights, adapters merged into them.

    Example: polyreme merge runs/smollm2_lora smollm2-kjv
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is trained
    from polyreme.recipes.weights import merge as recipe

    recipe.merge(source, target, base=base, dtype=dtype, max_shard_size=max_shard_size, say=typer.echo)


def chat(
    weights: Annotated[
        str,
        typer.Argument(metavar="RUN|FOLDER|GGUF", help="Output folder of a run, published weights, or a fetched name."),
    ],
    system: Annotated[str, typer.Option(help="What the model is told before every conversation.")] = "",
    adapter: Annotated[Path | None, typer.Option(metavar="FOLDER", help="An adapter of these weights.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest that make up this probability.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes tokens that were there less likely.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same answers.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16, or auto for the files'.")] = None,
) -> None:
    """Talk to a model, by the template that it was trained with. /new begins anew, /exit or the end of input leaves.

    Example: polyreme chat runs/smollm2_lora
    """
    from polyreme.generation import SamplingParams
    from polyreme.models.files import packages
    from polyreme.recipes.inference import chat as recipe

    params = SamplingParams(
        temperature=temperature, top_p=top_p, repetition_penalty=repetition_penalty, seed=seed,
        max_tokens=max_new_tokens,
    )  # fmt: skip

    def ask() -> str | None:
        if sys.stdin.isatty():
            say("> ")
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None  # an empty line has its end

    def say(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    recipe.run(packages.resolve(weights), params=params, system=system, dtype=dtype, adapter=adapter, ask=ask, say=say)
