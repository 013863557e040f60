"""`polyreme run`: this process becomes a plain Python in which `import paddle` gives polyreme.

It is the interpreter itself that runs the script, so that __main__, tracebacks, exit codes, -m, standard input, and
processes that the script starts are those of plain Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from polyreme.errors import ConfigError
from polyreme.paddle_scripts.finder import FOLDER

HELP = """Usage: polyreme run [PYTHON OPTION]... SCRIPT [ARGUMENT]...
       polyreme run [PYTHON OPTION]... -m MODULE [ARGUMENT]...

Run a script written for PaddlePaddle: `import paddle`, and any module of it, gives
polyreme, whether PaddlePaddle is installed or not. As with python, SCRIPT may be -
(standard input) or a folder, and the processes that the script starts run alike.

Example: polyreme run train.py --epochs 3
"""
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
# these make Python ignore PYTHONPATH, by which it finds polyreme as paddle
_DEAF = "EI"


def run(words: Sequence[str]) -> None:
    """Become the Python that runs these words; does not return. Raises ConfigError for options that rule it out."""
    _check(words)
    # the options this process was started with hold for the script as well
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *options, *words], environment(os.environ))


def environment(env: dict[str, str] | os._Environ[str]) -> dict[str, str]:
    """env with polyreme as paddle for every Python started with it.

    >>> environment({"PYTHONPATH": "/mine"})["PYTHONPATH"].endswith(":/mine")
    True
    """
    paths = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(FOLDER)]
    return {**env, "PYTHONPATH": os.pathsep.join([str(FOLDER), *paths])}


def _check(words: Sequence[str]) -> None:
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") or word == "-" or word.startswith(("-m", "-c")):
            return
        if word in _WITH_VALUE:
            next(rest, None)
        elif not word.startswith("--") and word[1] not in "WX" and set(word[1:]) & set(_DEAF):
            raise ConfigError(f"run {word}: -E and -I hide PYTHONPATH, by which scripts find polyreme; leave them out")
