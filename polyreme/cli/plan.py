"""`polyreme plan`: what a configuration will cost on devices that need not be there.

Floor: 7.  Never imports: jax.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from polyreme.errors import ConfigError
from polyreme.planner.published_file import answer, read_rows


def plan(
    rows: Annotated[
        Path | None, typer.Option("--predict", metavar="FILE", help="Rows of runs to predict: CSV, YAML or JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of lines.")] = False,
) -> None:
    """Predict the step time, MFU and memory of training runs, one for each row of a file.

    Example: polyreme plan --predict rows.csv --json
    """
    if rows is None:
        raise ConfigError("polyreme plan needs --predict FILE")
    _predict(rows, as_json)


def _predict(path: Path, as_json: bool) -> None:
    answers = [answer(row) for row in read_rows(path)]
    typer.echo(json.dumps(answers, indent=2) if as_json else "\n".join(map(_line, answers)))
    failed = [each for each in answers if "error" in each]
    if failed:
        raise ConfigError(f"{len(failed)} of {len(answers)} rows describe no run; the first: {failed[0]['error']}")


def _line(found: dict[str, Any]) -> str:
    name = f"{found.get('id', ''):8} {found.get('model', '')[:24]:24}"
    if "error" in found:
        return f"{name} {found['error']}"
    total = f"{found['memory']['total'] / 2**30:6.1f} GiB{'' if found['fits'] else ', more than there is'}"
    tokens = f"{found['tokens_per_second_per_device']:9.0f} tokens/s a device"
    return f"{name} {found['step_seconds']:10.3f} s  {tokens}  MFU {found['mfu']:.1%}  {total}  {found['binds']}"
