"""`polyreme generate`: text after a prompt."""

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from polyreme.errors import ConfigError


def generate(
    weights: Annotated[
        str,
        typer.Argument(metavar="RUN|FOLDER|GGUF", help="Output folder of a run, published weights, or a fetched name."),
    ],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "",
    image: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="An image that the prompt is about; several times."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Answer the prompt, by the model's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 64,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 takes the likeliest token; 0.8 if left out.")
    ] = None,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among this many; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest that make up this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Choose among those this likely, beside the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes tokens that were there less likely.")] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Where the text ends, left out; several times for several.")
    ] = None,
    num_beams: Annotated[
        int | None, typer.Option(min=1, help="Search the likeliest texts with so many open at a time; n best are told.")
    ] = None,
    length_penalty: Annotated[float, typer.Option(help="With --num-beams: above 0 favours long texts.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same text.")] = 0,
    n: Annotated[int, typer.Option("--n", min=1, help="Texts, of seeds SEED, SEED + 1, ...")] = 1,
    speculative: Annotated[
        str | None,
        typer.Option(metavar="ngram|FOLDER", help="Draft tokens from the text, or by a smaller model: the same text."),
    ] = None,
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="Tokens that are drafted at a time.")] = 5,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16, or auto for the files'.")] = None,
    adapter: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="An adapter of these weights, merged into them.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(help="Of keys and values: int8 (a scale for each head and token), bfloat16, float16, float32."),
    ] = None,
) -> None:
    """Write text with a trained model.

    Example: polyreme generate smollm2-135m --chat --temperature 0 --prompt "What is the capital of France?"
    """
    if temperature is not None and not math.isfinite(temperature):
        raise ConfigError(f"--temperature {temperature}: needs a number of at least 0")
    from polyreme.generation import BeamSearchParams, SamplingParams
    from polyreme.models.files import packages
    from polyreme.recipes.inference import generate as recipe

    def say(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    if num_beams is None:
        if length_penalty != 1:
            raise ConfigError("--length-penalty is of a beam search; give --num-beams too")
    else:
        unread = {
            "temperature": temperature is not None, "top-k": top_k != 0, "top-p": top_p != 1, "min-p": min_p != 0,
            "stop": bool(stop), "seed": seed != 0, "speculative": speculative is not None, "image": bool(image),
        }  # fmt: skip
        for name, is_given in unread.items():
            if is_given:
                raise ConfigError(f"--{name}: a beam search does not read it; leave it or --num-beams out")
        beams = BeamSearchParams(
            num_beams=num_beams, n=n, length_penalty=length_penalty, max_tokens=max_new_tokens,
            repetition_penalty=repetition_penalty,
        )  # fmt: skip
        recipe.search(
            packages.resolve(weights), prompt=prompt, params=beams, chat=chat, dtype=dtype,
            adapter=adapter, kv_cache_dtype=kv_cache_dtype, say=say,
        )  # fmt: skip
        return
    params = SamplingParams(
        n=n, temperature=0.8 if temperature is None else temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed, max_tokens=max_new_tokens, stop=tuple(stop or ()),
    )  # fmt: skip
    recipe.run(
        packages.resolve(weights), prompt=prompt, params=params, chat=chat, dtype=dtype, speculative=speculative,
        num_draft_tokens=num_draft_tokens, adapter=adapter, kv_cache_dtype=kv_cache_dtype, images=image or (), say=say,
    )  # fmt: skip
