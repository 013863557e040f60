"""One framework's layers, as they are made: what a Layer holds, and under which names.

Run by an interpreter that has the framework: `python structure_side.py FRAMEWORK LAYERS RESULTS`. LAYERS is a JSON list
of [class in nn, encoded arguments, encoded keywords], RESULTS a list with one description for each.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))


def plain(value: Any) -> Any:
    """A setting as JSON, with its type where JSON would lose it; None in the place of objects of the framework."""
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"<{type(value).__name__}>" if callable(value) or hasattr(value, "shape") else "<object>"


def described(layer: Any) -> dict[str, Any]:
    """Names, shapes and settings of a layer."""
    attributes = sorted(n for n in dir(layer) if not n.startswith("__"))
    settings = {n: plain(getattr(layer, n)) for n in attributes if not hasattr(type(layer), n) or n in vars(layer)}
    parameters = layer.named_parameters()
    return {
        "full_name": layer.full_name(),
        "parameters": [[n, p.name, list(p.shape), p.stop_gradient] for n, p in parameters],
        "buffers": [n for n, _ in layer.named_buffers()],
        "state": list(layer.state_dict()),
        "kept": sorted(vars(layer)),
        "settings": settings,
        "attributes": attributes,
    }


def main(framework: str, layers: str, results: str) -> None:
    """Write the descriptions."""
    from side import Side, decoded  # noqa: PLC0415  (both stand alone: see side.py)

    paddle = Side(framework).paddle

    def tensors(value: Any) -> Any:
        return paddle.to_tensor(value) if isinstance(value, np.ndarray) else value

    descriptions = []
    for name, args, kwargs in json.loads(Path(layers).read_text()):
        guard = importlib.import_module(f"{framework}.utils").unique_name.guard
        with guard():
            given = {k: tensors(v) for k, v in decoded(kwargs).items()}
            layer = getattr(paddle.nn, name)(*map(tensors, decoded(args)), **given)
        descriptions.append(described(layer))
    Path(results).write_text(json.dumps(descriptions))


if __name__ == "__main__":
    main(*sys.argv[1:])
