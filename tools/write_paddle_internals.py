"""Writes polyreme/paddle_scripts/paddle_internals.txt: names of PaddlePaddle's modules that are not public.

Run it with an interpreter that has PaddlePaddle, for the modules that scripts import beside the public ones:
`python tools/write_paddle_internals.py MODULE...`. Modules that the file has already are written anew.
"""

import contextlib
import importlib
import runpy
import sys
import tempfile
import types
import typing
from pathlib import Path

ROOT = Path(__file__).parent.parent / "polyreme" / "paddle_scripts"
PUBLIC = ROOT / "paddle_names.txt"
PAGE = ROOT / "paddle_internals.txt"
HEAD = (
    "# Names of modules of PaddlePaddle 3.3.1 that scripts import and that are not public, a module a line; a=b: the\n"
    "# name a is public as paddle.b, and all behind `from c` are imported from paddle.c there.\n"
    "# Written by tools/write_paddle_internals.py.\n"
)


def entries(path: Path) -> dict[str, list[str]]:
    """Module -> names of one of the two files."""
    if not path.exists():
        return {}
    lines = (line.partition(":") for line in path.read_text().splitlines() if not line.startswith("#"))
    return {module: names.split() for module, _, names in lines}


def public_paths() -> dict[int, str]:
    """id of a public function or class -> the shortest path below paddle that has it."""
    paths: dict[int, str] = {}
    for module, names in entries(PUBLIC).items():
        if module.startswith("paddle.fluid"):
            continue
        holder = importlib.import_module(module)
        for name in names:
            path = f"{module}.{name}".removeprefix("paddle.")
            value = getattr(holder, name, None)
            if callable(value) and path.count(".") < paths.get(id(value), path + ".").count("."):
                paths[id(value)] = path
    return paths


def line_of(module: str, public: dict[int, str], modules: set[str]) -> str:
    """What the module defines, what of the public API it has, and what it imports from others of the modules."""
    names, known, imported = [], entries(PUBLIC).get(module, ()), {}
    target = runpy.run_path(str(ROOT / "paths.py"))["PATHS"].get(module.removeprefix("paddle."))
    for name, value in vars(importlib.import_module(module)).items():
        home = getattr(value, "__module__", None)
        if name.startswith("__") or isinstance(value, (types.ModuleType, typing.TypeVar, typing.ParamSpec)):
            continue
        path = public.get(id(value))
        if path is not None and path == (f"{target}.{name}" if target else name) and target is not None:
            continue
        if path is not None and name not in known:
            names.append(name if path == name else f"{name}={path}")
        elif path is None and (
            f"{home}.".startswith(f"{module}.") or (home is None and name.isupper() and name != "TYPE_CHECKING")
        ):
            names.append(name)
        elif path is None and name not in known and home in modules:
            imported.setdefault(home.removeprefix("paddle."), []).append(name)
    words = sorted(names)
    for home, its_names in sorted(imported.items()):
        words += ["from", home, *sorted(its_names)]
    return f"{module}: {' '.join(words)}"


def main() -> None:
    """Write the file for the modules named on the command line and those that it has."""
    modules = sorted({*entries(PAGE), *sys.argv[1:]})
    public = public_paths()
    lines = [line_of(module, public, set(modules)) for module in modules]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    # PaddlePaddle's key-value server writes http.log where it is imported
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        main()
