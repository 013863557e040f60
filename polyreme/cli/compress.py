"""`polyreme quantize` and `polyreme prune`: decoders made smaller."""

from pathlib import Path
from typing import Annotated

import typer

Source = Annotated[
    str, typer.Argument(metavar="RUN|FOLDER|GGUF", help="Output folder of a run, published weights, or a fetched name.")
]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="A new folder, which appears when it is whole.")]
Data = Annotated[
    list[Path], typer.Option(help="Text that the model is calibrated and measured on; several times for several.")
]
Samples = Annotated[int, typer.Option(help="Rows of tokens to calibrate on; as many, at most 16, to measure on.")]
Length = Annotated[int, typer.Option(help="Tokens of a row; the model's positions, at most 512, if 0.")]
Skip = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A linear map, or part of its name, that stays as it is; several times."),
]
Bound = Annotated[float, typer.Option(help="How many times the perplexity may be of what is written.")]
Force = Annotated[bool, typer.Option("--force", help="Write it whatever the perplexity.")]
Report = Annotated[bool, typer.Option("--report", help="Show the error of every linear map.")]


def quantize(
    source: Source,
    target: Target,
    data: Data,
    method: Annotated[str, typer.Option(help="rtn (to the nearest), gptq, awq, smooth or fp8.")] = "rtn",
    type_: Annotated[str, typer.Option("--type", help="wint8, wint4, nf4, a8w8, wfp8 or a8w8_fp8.")] = "",
    group_size: Annotated[int, typer.Option(help="Inputs that share a scale; all if -1.")] = -1,
    act_order: Annotated[bool, typer.Option("--act-order", help="gptq: the largest activations first.")] = False,
    smooth_strength: Annotated[float, typer.Option(help="smooth: share of outliers that weights take over.")] = 0.5,
    samples: Samples = 32,
    length: Length = 0,
    skip: Skip = None,
    bound: Bound = 1.25,
    force: Force = False,
    report: Report = False,
) -> None:
    """Write a decoder with linear maps of few bits, measured before and after, and read back.

    Example: polyreme quantize smollm2 smollm2-w4 --method gptq --type wint4 --group-size 64 --data text.txt
    """
    from polyreme.compression import QUANTIZATION_METHODS, QuantizationOptions
    from polyreme.models.files import packages
    from polyreme.recipes.inference import compress

    # what a method makes if not told otherwise: the first of its types
    type_ = type_ or QUANTIZATION_METHODS.get(method, ("wint8",))[0]
    options = QuantizationOptions(method, type_, group_size, act_order, smooth_strength, tuple(skip or ()))
    result = compress.quantize(
        packages.resolve(source),
        target,
        options,
        compress.DataOptions(tuple(data), samples, length),
        bound=bound,
        force=force,
        say=typer.echo,
    )
    _tell(result.lines(report), target)


def prune(
    source: Source,
    target: Target,
    data: Data,
    method: Annotated[str, typer.Option(help="magnitude, wanda, sparsegpt, or structured (channels).")] = "wanda",
    sparsity: Annotated[str, typer.Option(help="Share of zeros, as 0.5, or n of m that stay, as 2:4.")] = "0.5",
    samples: Samples = 32,
    length: Length = 0,
    skip: Skip = None,
    bound: Bound = 1.25,
    force: Force = False,
    report: Report = False,
) -> None:
    """Write a decoder with weights that are zero, measured before and after, and read back.

    Example: polyreme prune smollm2 smollm2-sparse --method sparsegpt --sparsity 2:4 --data text.txt
    """
    from polyreme.compression import Sparsity
    from polyreme.models.files import packages
    from polyreme.recipes.inference import compress

    result = compress.prune(
        packages.resolve(source),
        target,
        method,
        Sparsity.parse(sparsity),
        compress.DataOptions(tuple(data), samples, length),
        skip=skip or (),
        bound=bound,
        force=force,
        say=typer.echo,
    )
    _tell(result.lines(report), target)


def _tell(lines, target: Path) -> None:
    for line in lines:
        typer.echo(line)
    typer.echo(str(target))
