"""read: an artefact of our own, or a model that PaddlePaddle saved for inference, by what its files begin with."""

from __future__ import annotations

import os
from pathlib import Path

from polyreme.errors import CheckpointError
from polyreme.export.artifact import Artifact, read_own
from polyreme.export.paddle_artifact import read_paddle
from polyreme.paddle_models import is_pir


def read(prefix: str | os.PathLike[str], parameters: str | os.PathLike[str] | None = None) -> Artifact:
    """Reads PREFIX.json and what it names, as `write` wrote it, checking every digest; or PREFIX.pdmodel or PREFIX.json
    with PREFIX.pdiparams, as PaddlePaddle wrote them. Runs no code of the model.

    parameters: a file of PaddlePaddle's parameters, or a folder with one for each; prefix is then the program's file by
    its whole name.
    Raises CheckpointError for a file that is missing, changed (which, the digest expected and the one found), cut, or
    of a program with operations that are not known here.
    """
    base = Path(prefix)
    if parameters is not None:
        return read_paddle(base, Path(parameters))
    manifest, program = (base.with_name(f"{base.name}{suffix}") for suffix in (".json", ".pdmodel"))
    if manifest.exists() and _is_pir(manifest):
        program = manifest
    elif manifest.exists() or not program.exists():
        return read_own(base)
    file = base.with_name(f"{base.name}.pdiparams")
    return read_paddle(program, file if file.exists() else None)


def _is_pir(path: Path) -> bool:
    with open(path, "rb") as file:
        return is_pir(file.read(64))


def is_paddle(program: Path) -> bool:
    """Whether a file is to be read as a PaddlePaddle program: it is there, and of no file of an artefact.

    Raises CheckpointError for a Program that static.save wrote, which is not for inference.
    """
    if not program.is_file():
        return False
    if program.suffix in (".json", ".stablehlo", ".safetensors"):
        return _is_pir(program)
    with open(program, "rb") as file:
        if file.read(1) == b"{":
            raise CheckpointError(
                f"{program}: is a Program that static.save wrote, to train on; write what serves with "
                "static.save_inference_model"
            )
    return True
