"""save_dygraph and load_dygraph: the state of a model and of its optimizer in two files beside each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from polyreme.errors import CheckpointError, ConfigError
from polyreme.io.serialization import load, save
from polyreme.nn.parameter import Parameter

_MODEL, _OPTIMIZER = ".pdparams", ".pdopt"


def save_dygraph(state_dict: Mapping[str, Any], model_path: str | os.PathLike[str]) -> None:
    """Write a Layer's state to MODEL_PATH.pdparams, an optimizer's to MODEL_PATH.pdopt.

    A state with a parameter in it is a Layer's. Raises ConfigError for an empty state, and for a path that is a folder.
    """
    path = os.fspath(model_path)
    if not state_dict:
        raise ConfigError(
            "save_dygraph: the state_dict is empty; a Layer has parameters, an optimizer state after a step"
        )
    if not os.path.basename(path):
        raise ConfigError(f"save_dygraph: model_path {path!r} is a folder; add what the files are called")
    is_model = any(isinstance(value, Parameter) for value in state_dict.values())
    save(dict(state_dict), f"{path}{_MODEL if is_model else _OPTIMIZER}")


def load_dygraph(
    model_path: str | os.PathLike[str], keep_name_table: bool = False
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """-> (a Layer's state, an optimizer's) of ndarrays, None for the one that has no file; of PaddlePaddle's files too.

    keep_name_table: the Layer's comes with the table of its parameters' names. Raises CheckpointError if there is
    neither file.
    """
    path = os.fspath(model_path).removesuffix(_MODEL).removesuffix(_OPTIMIZER)
    settings = {_MODEL: {"keep_name_table": keep_name_table}, _OPTIMIZER: {}}
    states = [
        load(f"{path}{suffix}", return_numpy=True, **configs) if os.path.exists(f"{path}{suffix}") else None
        for suffix, configs in settings.items()
    ]
    if states == [None, None]:
        raise CheckpointError(f"load_dygraph: there is neither {path}{_MODEL} nor {path}{_OPTIMIZER}")
    return states[0], states[1]


__all__ = ["load_dygraph", "save_dygraph"]
