"""Files of rows that describe training runs (CSV, YAML, JSON), and the answer to each."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from polyreme.errors import ConfigError, PlacementError, ShapeError
from polyreme.planner.conventions import flops_by_convention
from polyreme.planner.interval import reasons
from polyreme.planner.published import columns_not_read, run_of
from polyreme.yaml_loader import YamlLoader

Row = Mapping[str, Any]


def read_rows(path: str | Path) -> list[Row]:
    """Rows of a .csv file with a header line, or of a .yaml, .yml or .json file that has one row or a list of them.

    Raises ConfigError for a file that cannot be read as what its ending says, and for one without rows.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    reader = {".csv": _csv, ".yaml": _yaml, ".yml": _yaml, ".json": json.loads}.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: rows come as .csv, .yaml, .yml or .json; rename or convert the file")
    try:
        found = reader(text)
    except (yaml.YAMLError, ValueError, csv.Error, RecursionError) as error:
        raise ConfigError(f"{path} is not valid {path.suffix[1:]}: {error}") from error
    rows = [found] if isinstance(found, Mapping) else found
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"{path} has no rows; give a header line and lines, or a list of mappings")
    return rows


def _yaml(text: str) -> Any:
    return yaml.load(text, YamlLoader)


def _csv(text: str) -> list[Row]:
    reader = csv.DictReader(io.StringIO(text, newline=""), restkey="", strict=True)
    twice = [name for name, count in Counter(reader.fieldnames or ()).items() if count > 1]
    if twice:
        raise ConfigError(f"the header has column {twice[0]!r} twice; leave one out")
    rows: list[Row] = []
    for row in reader:
        if "" in row:
            line = reader.line_num
            raise ConfigError(f"line {line} has more cells than the header has columns; quote cells with commas")
        rows.append(row)
    return rows


def _plain(value: object) -> object:
    """As JSON can say it: YAML reads a date as one."""
    return value if isinstance(value, (int, float)) else str(value)


def answer(row: Row) -> dict[str, Any]:
    """What predict says of a row, as plain values; {"id", "not_read", "error"} for a row that describes no run.

    Seconds, bytes, tokens a second and 1e12 FLOP a second, of the model's FLOP without recompute; tflops_by_convention
    counts them as the row's flops_convention does. not_read: as columns_not_read. not_understood: what the row says
    that the prediction does not follow.
    """
    name: dict[str, Any] = {key: _plain(row[key]) for key in ("id", "model") if row.get(key)}
    name |= {"not_read": columns_not_read(row)}
    try:
        run = run_of(row)
        prediction = run.predict()
    except (ConfigError, PlacementError, ShapeError) as error:
        return {**name, "error": str(error)}
    devices, step = run.cluster.num_devices, prediction.step_seconds
    rate = 1e12 * step * devices
    convention = str(row.get("flops_convention") or "model")
    plan = run.plan
    return {
        **name,
        "step_seconds": step,
        "interval": list(prediction.interval),
        "less_sure_by": list(reasons(run.model.graph(), run.plan, run.cluster, run.training)),
        "tokens_per_second_per_device": prediction.tokens_per_second / devices,
        "tflops_per_device": flops_by_convention("model", run.model, run.batch) / rate,
        "tflops_by_convention": flops_by_convention(convention, run.model, run.batch) / rate,
        "mfu": prediction.mfu,
        "fits": prediction.fits,
        "memory": {**asdict(prediction.memory), "total": prediction.memory.total, "capacity": prediction.capacity},
        "times": asdict(prediction.times),
        "binds": prediction.binds,
        "batch": run.batch,
        "plan": plan.to_dict(),
        "device": run.cluster.device.name,
        "training": asdict(run.training),
        "assumed": dict(run.assumed),
        "not_understood": list(run.not_understood),
    }
