"""`polyreme eval`: how good a model is."""

from pathlib import Path
from typing import Annotated

import typer

from polyreme.cli.key_file import first_line


def evaluate(
    target: Annotated[
        str,
        typer.Argument(metavar="RUN|FOLDER|GGUF|URL", help="A run, published weights, a fetched name, or a server."),
    ],
    tasks: Annotated[
        str, typer.Option(metavar="NAME,...", help="ppl, choice, generate, kjv_cloze, kjv_order, lm_eval:NAME.")
    ] = "ppl",
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text for ppl, rows for others; several times for several."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of a task, windows of ppl, at most.")] = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="Tokens of a window of ppl.")] = None,
    stride: Annotated[int | None, typer.Option(min=1, help="Tokens that a window of ppl scores; half of it.")] = None,
    num_fewshot: Annotated[int, typer.Option(min=0, help="Rows shown with their answers before each one.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Ask by the model's chat template.")] = False,
    add_bos: Annotated[
        bool | None, typer.Option("--add-bos/--no-add-bos", help="Begin plain text so; as the tokenizer has it.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of written answers.")] = 64,
    stop: Annotated[list[str] | None, typer.Option(help="Where an answer ends; several times for several.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the rows that are shown.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16, or auto for the files'.")] = None,
    adapter: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="An adapter of these weights, merged into them.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="Of keys and values: int8 (a scale for each head and token), bfloat16, ...")
    ] = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder of tasks of your own for lm_eval.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The server's key, on its first line.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Results are added to it, a JSON object a line.")
    ] = None,
) -> None:
    """Put tasks to a model and say how good it is; the same numbers in this process and from a server.

    Every row of --output says what its numbers depend on: digest of the chat template, whether a text begins with BOS,
    rows shown, seed, dtype, plan, digests of the data, and the first prompt as the model saw it.

    Example: polyreme eval smollm2-135m --tasks ppl,kjv_cloze --data data/kjv.txt.gz --limit 20
    """
    from polyreme.evaluation import EvalOptions
    from polyreme.recipes.inference import evaluate as recipe

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    recipe.check_tasks(names)
    options = EvalOptions(
        limit, max_length, stride, num_fewshot, seed, chat, add_bos, max_new_tokens, tuple(stop or ())
    )
    key = None if api_key_file is None else first_line(api_key_file)
    scorer = recipe.open_scorer(target, dtype, key, adapter, kv_cache_dtype)
    for result in recipe.evaluate(scorer, names, options, data or [], include_path):
        for line in recipe.result_lines(result):
            typer.echo(line)
        if output is not None:
            recipe.write_rows(output, [result])
