"""`polyreme data`: text to token files, what they hold, whether they are whole, and samples as a model sees them."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from polyreme.errors import ConfigError, DataError

data_app = typer.Typer(name="data", no_args_is_help=True, help="Prepare training data, and look at it.")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML configuration, such as configs/gpt_kjv.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file's; --settings lists them."),
]
Tokenizer = Annotated[
    str | None, typer.Option(metavar="T", help="Of rows: a run, a folder or GGUF file of weights, or a fetched name.")
]
Template = Annotated[
    str | None, typer.Option(metavar="NAME|FILE", help="Of rows: a chat template, if not the tokenizer's own.")
]
RowType = Annotated[
    str | None, typer.Option("--type", metavar="TYPE", help="Of rows: their format, if their keys do not tell.")
]
MaxSeqLen = Annotated[int, typer.Option(min=2, help="Of rows: tokens of a conversation and of a sample.")]
Truncation = Annotated[
    str, typer.Option(metavar="turns|drop|cut|refuse", help="Of rows: what becomes of longer conversations.")
]
Prefix = Annotated[Path, typer.Argument(metavar="PREFIX", help="Of PREFIX.bin and PREFIX.idx.")]


@data_app.command()
def prepare(
    inputs: Annotated[
        list[str], typer.Argument(metavar="IN...", help="Files: .txt, .jsonl (each also .gz or .zst), .parquet.")
    ],
    tokenizer: Annotated[
        str, typer.Option(metavar="T", help="tokenizer.json, a folder or GGUF file of weights, or a fetched name.")
    ],
    output: Annotated[Path, typer.Option(metavar="PREFIX", help="Of the .bin and .idx files that are written.")],
    append_eos: Annotated[bool, typer.Option("--append-eos", help="Close each document with the end token.")] = False,
    eos: Annotated[str | None, typer.Option(metavar="TOKEN", help="The end token, if not the tokenizer's own.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that tokenize; 0 for threads of this one.")] = 0,
    split: Annotated[
        str | None, typer.Option(metavar="98,2", help="Weights of PREFIX_train, PREFIX_valid and PREFIX_test.")
    ] = None,
    dedup: Annotated[
        str | None, typer.Option(metavar="exact|minhash", help="Leave out documents that come again, or nearly.")
    ] = None,
    documents: Annotated[
        str, typer.Option(metavar="file|paragraph|line|^REGEX", help="What is a document of a text file.")
    ] = "file",
    key: Annotated[str, typer.Option(help="Key or column of the text in .jsonl and .parquet.")] = "text",
    skip_bad: Annotated[int, typer.Option(min=0, metavar="N", help="Leave out up to N lines that cannot be read.")] = 0,
) -> None:
    """Tokenize text into the .bin and .idx files that Megatron-LM and PaddleNLP read too.

    Example: polyreme data prepare book.txt --tokenizer smollm2-135m --output data/book --documents paragraph
    """
    _prepare()
    if eos is not None and not append_eos:
        raise ConfigError(f"--eos {eos} without --append-eos has no use; give both")
    from polyreme.data import preparation
    from polyreme.data.documents import DocumentForm
    from polyreme.recipes.data.token_data import load_tokenizer

    loaded, end = load_tokenizer(tokenizer, eos)
    if append_eos and end is None:
        raise ConfigError(f"--append-eos: nothing says which token of {tokenizer} ends a text; name it with --eos")
    how = preparation.Preparation(
        tokenizer=loaded.to_str(),
        end=end if append_eos else None,
        form=DocumentForm(documents, key),
        parts=_weights(split),
        skip_bad=skip_bad,
        dedup=dedup,
        workers=workers,
    )
    written = preparation.prepare(inputs, output, how, lambda line: typer.echo(line, err=True))
    for prefix, (count, tokens) in written.pairs.items():
        typer.echo(f"{prefix}: {count:,} documents, {tokens:,} tokens")
    for why, count in written.left_out.items():
        typer.echo(f"left out: {count:,} {why}")
    total = sum(tokens for _, tokens in written.pairs.values())
    typer.echo(f"{written.seconds:.1f} s, {total / max(written.seconds, 1e-9):,.0f} tokens/s")


@data_app.command()
def stats(prefixes: Annotated[list[Path], typer.Argument(metavar="PREFIX...", help="Of .bin and .idx files.")]) -> None:
    """How much pairs of token files hold, and how long their documents are."""
    _prepare()
    from polyreme.recipes.data import token_data

    for prefix in prefixes:
        for line in token_data.stats_lines(prefix):
            typer.echo(line)


@data_app.command()
def check(
    path: Annotated[
        Path,
        typer.Argument(metavar="PREFIX|ROWS|CONFIG", help="Of PREFIX.bin and .idx; a file of rows; a fine-tuning run."),
    ],
    overrides: Overrides = None,
    tokenizer: Tokenizer = None,
    template: Template = None,
    row_type: RowType = None,
    max_seq_len: MaxSeqLen = 2048,
    truncation: Truncation = "turns",
) -> None:
    """Look for what is wrong with data before anything is computed.

    Of a pair of token files every byte is read: sizes that agree, tokens of the vocabulary, digests as prepared. Of
    rows of conversations (.jsonl, .json, .parquet), with --tokenizer: rows of the wrong form, a doubled beginning,
    answers without their end, conversations that are too long, empty messages, duplicates; of the configuration of a
    fine-tuning run the same of all its files. Exit code 3 if a model would learn something wrong.
    """
    _prepare()
    if path.suffix in (".yaml", ".yml"):
        _check_run(path, overrides or [])
        return
    _refuse_settings(path, overrides)
    if not _has_rows(path):
        from polyreme.recipes.data import token_data

        for line in token_data.check_lines(path):
            typer.echo(line)
        return
    source = _open_rows(path, tokenizer, template, row_type, max_seq_len, truncation)
    _tell_report(str(path), source, max_seq_len)


def _check_run(path: Path, overrides: list[str]) -> None:
    from polyreme.recipes import config_file
    from polyreme.recipes.data.chat_data import open_run_rows
    from polyreme.recipes.finetune_config import FinetuneConfig

    loaded = config_file.load(path, overrides)
    if not isinstance(loaded.config, FinetuneConfig):
        raise ConfigError(f"{path}: check reads the rows of a fine-tuning run, or a pair of token files by its PREFIX")
    for name, source in open_run_rows(loaded.config, loaded.folder):
        typer.echo(f"{name}:")
        _tell_report(name, source, loaded.config.max_seq_len)


def _tell_report(name: str, source: Any, max_seq_len: int) -> None:
    report = source.report()
    for line in report.lines(max_seq_len):
        typer.echo(line)
    if not report.is_good:
        raise DataError(f"{name}: a model would learn something wrong from these rows; mend what is called an error")


def _refuse_settings(path: Path, overrides: list[str] | None) -> None:
    if overrides:
        raise ConfigError(f"{overrides[0]}: settings are for a configuration, which {path} is not; it takes options")


@data_app.command()
def pack(
    prefix: Prefix,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a sample (model.seq_len).")],
) -> None:
    """How documents of different lengths become samples: rows and how full they are, for each data.packing.

    Example: polyreme data pack data/book --seq-len 2048
    """
    _prepare()
    from polyreme.recipes.data import token_data

    for line in token_data.pack_lines(prefix, seq_len):
        typer.echo(line)


@data_app.command()
def blend(config: ConfigPath, overrides: Overrides = None) -> None:
    """How the sources of data.train are mixed: share, samples, and how often a run reads each.

    Example: polyreme data blend run.yaml train.steps=1000
    """
    from polyreme.recipes import config_file
    from polyreme.recipes.data import token_data

    loaded = config_file.load(config, overrides or [])
    for line in token_data.blend_lines(loaded.config, loaded.folder):
        typer.echo(line)


@data_app.command()
def preview(
    config: Annotated[Path, typer.Argument(metavar="CONFIG|ROWS", help="A configuration, or a file of rows for chat.")],
    overrides: Overrides = None,
    count: Annotated[int, typer.Option("-n", min=1, help="How many samples.")] = 3,
    tokenizer: Tokenizer = None,
    template: Template = None,
    row_type: RowType = None,
    max_seq_len: MaxSeqLen = 2048,
    truncation: Truncation = "turns",
    packing: Annotated[bool, typer.Option(help="Conversations share samples, as far as they fit.")] = True,
) -> None:
    """Show training samples as the model will see them, prepared and decoded again.

    Of rows of conversations the tokens that count in the loss are green on a terminal, between [[ and ]] elsewhere.
    """
    from polyreme.data.chat_preview import COLOUR, PLAIN

    marks = COLOUR if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else PLAIN
    if _has_rows(config):
        _prepare()
        _refuse_settings(config, overrides)
        source = _open_rows(config, tokenizer, template, row_type, max_seq_len, truncation)
        for line in source.preview(count, is_packed=packing, marks=marks):
            typer.echo(line)
        return
    from polyreme.recipes import config_file

    loaded = config_file.load(config, overrides or [])
    data = loaded.config.samples.load.load()(loaded.config, loaded.folder)
    typer.echo(f"{data.summary}; {len(data.train):,} training and {len(data.validation):,} validation samples")
    for index in range(min(count, len(data.train))):
        typer.echo(f"\n--- sample {index}: {data.shown(index, marks)}")


def _has_rows(path: Path) -> bool:
    from polyreme.data.documents import holds_rows

    return holds_rows(path)


def _open_rows(
    path: Path, tokenizer: str | None, template: str | None, row_type: str | None, max_seq_len: int, truncation: str
) -> Any:
    from polyreme.data.chat_encoding import ChatForm
    from polyreme.recipes.data.chat_data import open_rows

    if tokenizer is None:
        raise ConfigError(f"{path}: rows become tokens by a tokenizer; give --tokenizer, such as smollm2-135m")
    form = ChatForm(max_seq_len, truncation=truncation)
    return open_rows([path], tokenizer, form, template=template, row_type=row_type)


def _weights(text: str | None) -> tuple[float, ...]:
    try:
        return (1.0,) if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--split {text}: needs weights such as 98,2 or 90,5,5") from None


def _prepare() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed by a device
