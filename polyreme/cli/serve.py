"""`polyreme serve`: a decoder over HTTP, as OpenAI's clients ask for it."""

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from polyreme.errors import ConfigError


def serve(
    weights: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER|RUN|GGUF", help="Published weights, the output folder of a run, or a fetched name."
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keys, one a line, of which a request needs one.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let other machines ask without a key.")] = False,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="https://HOST whose pages may ask; several times for several."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model; several times for several. By default the path's last.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16, or auto for the files'.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a prompt and its text; the model's positions if left out.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Texts that are written at once.")] = 8,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block of the cache.")] = 16,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="Blocks of the cache.")] = None,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Tokens of a prompt that a step takes in.")] = 64,
    enable_prefix_caching: Annotated[
        bool | None, typer.Option(help="Compute beginnings that prompts share once; done where the model allows it.")
    ] = None,
    plan: Annotated[
        str | None, typer.Option(metavar="mp=N", help="Split weights and heads over N devices; one if left out.")
    ] = None,
    speculative: Annotated[
        str | None,
        typer.Option(metavar="ngram|FOLDER", help="Draft tokens from the text, or by a smaller model: the same texts."),
    ] = None,
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a text that are drafted at a time.")] = 5,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FOLDER",
            help="An adapter of these weights, which requests ask for by name; several times for several. Without a "
            "name the only one, merged into the weights.",
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(help="Of keys and values: int8 (a scale for each head and token), bfloat16, float16, float32."),
    ] = None,
    generation_config: Annotated[
        str,
        typer.Option(help="auto: requests that say no temperature, top_p, ... have the weights' own; vllm: OpenAI's."),
    ] = "auto",
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A chat template, in place of the tokenizer's.")
    ] = None,
    max_waiting: Annotated[int, typer.Option(min=0, help="Texts that may wait for a place.")] = 128,
    request_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a request is given up.")] = 600.0,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a request's body.")] = 4 << 20,
    drain_timeout: Annotated[float, typer.Option(min=1, help="Seconds for requests to end after SIGTERM.")] = 30.0,
) -> None:
    """Serve a model over HTTP as OpenAI's API has it, until SIGTERM or Ctrl-C.

    Example: polyreme serve smollm2-135m, then open http://127.0.0.1:8000/v1/models
    """
    if plan is not None:
        os.environ.setdefault("CPU_NUM", plan.rpartition("=")[2])  # of no effect on accelerators
    # what a start makes it keeps: to look for cycles among that took a tenth of its processor time
    gc.disable()
    try:
        from polyreme.models.files import packages
        from polyreme.serving import loading
        from polyreme.serving.guard import Access
        from polyreme.serving.server import ServerOptions, leave, names_of
        from polyreme.serving.server import serve as run
        from polyreme.serving.service import ServiceLimits

        path = packages.resolve(weights)
        merged, named = _adapters(adapter or ())
        engine = loading.EngineOptions(
            dtype, max_num_seqs, max_model_len, block_size, num_blocks, prefill_chunk, enable_prefix_caching,
            speculative, num_draft_tokens, merged, named, plan, kv_cache_dtype, generation_config, chat_template,
        )  # fmt: skip
        options = ServerOptions(
            names=names_of(weights, served_model_name or ()),
            adapters=tuple(named),
            host=host,
            port=port,
            drain_seconds=drain_timeout,
            limits=ServiceLimits(max_num_seqs, max_waiting, request_timeout, max_body_bytes),
            access=Access.of(host, api_key_file, allow_origin or (), is_insecure=insecure),
        )

        def say(text: str) -> None:
            typer.echo(text)

        def load() -> Any:
            served = loading.load_served(path, engine, say)
            gc.enable()
            return served

        run(options, load, say)
    finally:
        gc.enable()
    leave()


def _adapters(options: Sequence[str]) -> tuple[Path | None, dict[str, Path]]:
    """The adapter that has no name, and the folders of the others by name. Raises ConfigError for two of a name."""
    merged, named = None, {}
    for option in options:
        name, sign, folder = option.rpartition("=")
        if not folder or (sign and not name.strip()) or name in named or (not sign and merged is not None):
            raise ConfigError(f"--adapter {option}: give each adapter a name of its own, as NAME=FOLDER")
        if sign:
            named[name] = Path(folder)
        else:
            merged = Path(folder)
    return merged, named
