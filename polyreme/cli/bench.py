"""`polyreme bench`: how long a server makes its clients wait, and how fast a model writes without one."""

from pathlib import Path
from typing import Annotated, Any

import typer

from polyreme.cli.key_file import first_line

bench_app = typer.Typer(name="bench", no_args_is_help=True, help="Measure a server, or a model without one.")


@bench_app.callback()
def _measure() -> None:
    """Measure a server, or a model without one."""


@bench_app.command()
def serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of the server, such as http://127.0.0.1:8000.")],
    num_requests: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 100,
    request_rate: Annotated[float, typer.Option(help="Requests a second on average; inf for all at once.")] = 4.0,
    input_words: Annotated[int, typer.Option(min=1, help="Words of a prompt.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a text.")] = 64,
    ignore_eos: Annotated[bool, typer.Option(help="Texts go on after their end; a field that vLLM added.")] = True,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the requests.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and prompts.")] = 0,
    model: Annotated[str | None, typer.Option(help="Name of the model; the first that the server lists.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="The first line is the key.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """Send requests that arrive at random, and say how long they wait.

    Arrivals are a Poisson process that does not wait for answers, so that a slow server shows its queue. ttft is the
    time to the first text, tpot that of each token after it, itl between two texts that came, e2e to the end. Exits 1
    if a request failed. Example: polyreme bench serve http://127.0.0.1:8000 --request-rate 2
    """
    from polyreme.serving.load import LoadOptions, load

    report = load(
        LoadOptions(
            url=url.removesuffix("/").removesuffix("/v1"),
            num_requests=num_requests,
            rate=request_rate,
            input_words=input_words,
            output_tokens=output_tokens,
            ignore_eos=ignore_eos,
            temperature=temperature,
            seed=seed,
            model=model,
            key=None if api_key_file is None else first_line(api_key_file),
        )
    )
    if as_json:
        typer.echo(report.as_json())
    else:
        for line in report.lines():
            typer.echo(line)
    if report.num_failed:
        raise typer.Exit(1)


@bench_app.command()
def latency(
    weights: Annotated[str, typer.Argument(metavar="RUN|FOLDER|GGUF", help="What polyreme generate takes.")],
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of a text.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts that are written as one batch.")] = 8,
    num_iters: Annotated[int, typer.Option(min=1, help="Times that it is written.")] = 5,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16, or auto for the files'.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """Write a batch of texts several times, and say how long it takes.

    Example: polyreme bench latency smollm2-135m --batch-size 1 --output-len 32
    """
    from polyreme.models.files import packages
    from polyreme.recipes.inference import writing_speed

    load = writing_speed.WritingLoad(input_len, output_len, seed)
    path = packages.resolve(weights)
    _tell(writing_speed.latency(path, load, batch_size=batch_size, num_iters=num_iters, dtype=dtype), as_json)


@bench_app.command()
def throughput(
    weights: Annotated[str, typer.Argument(metavar="RUN|FOLDER|GGUF", help="What polyreme generate takes.")],
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of a text.")] = 128,
    num_prompts: Annotated[int, typer.Option(min=1, help="Texts to write.")] = 64,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Texts that are written at once.")] = 8,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16, or auto for the files'.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """Write after many prompts that are there at once, as a server would, and say how many tokens a second come.

    Example: polyreme bench throughput smollm2-135m --num-prompts 16
    """
    from polyreme.models.files import packages
    from polyreme.recipes.inference import writing_speed

    load = writing_speed.WritingLoad(input_len, output_len, seed)
    path = packages.resolve(weights)
    _tell(
        writing_speed.throughput(path, load, num_prompts=num_prompts, max_num_seqs=max_num_seqs, dtype=dtype), as_json
    )


def _tell(report: Any, as_json: bool) -> None:
    for line in [report.as_json()] if as_json else report.lines():
        typer.echo(line)
