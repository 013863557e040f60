"""Writes the stubs of the op tables, polyreme/ops/*.pyi, and of Tensor's methods, polyreme/eager/*.pyi.

An op is declared on arrays and called with Tensors, which no decorator can say to a type checker. The stubs say it,
from the declaration: what it takes as an array is a TensorLike to its callers, what it gives is a Tensor. Packages
whose names load when they are asked for get a stub that imports them. Run it after adding or changing an op:
`python tools/write_stubs.py`. tests/test_api.py fails when a stub is out of date.
"""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from polyreme.core.op import DRAWN
from polyreme.eager.casts import CASTS
from polyreme.eager.methods import OpMethods

ROOT = Path(__file__).parent.parent
TABLES = ROOT / "polyreme" / "ops"
HEAD = '"""For type checkers: {what}. Written by tools/write_stubs.py."""\n\n'
ARRAY = re.compile(r"\w+\[Array, *(?:'.*?'|\".*?\")\]|\b(?:jax\.)?Array\b")
PRIVATE = re.compile(r"^\s*from polyreme\S* import [^()\n]*\b_[a-z]|^\s*from polyreme\S* import \([^)]*\b_[a-z]", re.M)
"""An import of a private name: most files have none and need not be parsed."""
KNOWN = {
    "Any": "from typing import Any",
    "Callable": "from collections.abc import Callable",
    "Sequence": "from collections.abc import Sequence",
    "Tensor": "from polyreme.eager.tensor import Tensor",
    "TensorLike": "from polyreme.core.annotations import TensorLike",
    "AbstractContextManager": "from contextlib import AbstractContextManager",
}
LAZY = (
    "polyreme",
    "polyreme.audio",
    "polyreme.distributed",
    "polyreme.io",
    "polyreme.jit",
    "polyreme.models",
    "polyreme.text",
    "polyreme.vision",
)
"""Packages whose names load when one of them is asked for, which a type checker cannot follow."""
WHOLE = {
    "polyreme": ("polyreme.api",),
    "polyreme.distributed": ("polyreme.distributed.api",),
    "polyreme.models": ("polyreme.models.auto",),
}
"""Modules all of whose names a package has."""
NAME = "name: str | None = None"
EVERY_OP = (NAME, "out: Tensor | None = None")
"""What the call of any op takes besides its own parameters; the name by place too, behind them."""


def is_op(value: Any) -> bool:
    """Whether a value is the public function of an op, which runs on arrays."""
    return hasattr(value, "op")


def of_caller(annotation: Any, array: str, tensor: str) -> str:
    """An annotation with what stands for arrays and for Tensors in it; Any where there is none."""
    if annotation is inspect.Signature.empty:
        return "Any"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"\bAnyTensor\b", tensor, ARRAY.sub(array, text) if array else text)
    return "None" if text == "NoneType" else text.replace("builtins.", "")


def default(value: Any) -> str:
    """A default as a stub shows it: a constant that reads back as itself, or `...`."""
    try:
        return repr(value) if ast.literal_eval(repr(value)) == value else "..."
    except (ValueError, SyntaxError):
        return "..."


def parameters(value: Callable[..., Any], skip: int = 0) -> Iterator[str]:
    """The parameters of a function as its callers give them, without the first few."""
    op, starred = is_op(value), False
    shown = list(inspect.signature(value).parameters.values())[skip:]
    names = {p.name for p in shown}
    for p in shown:
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        if star == "**":
            yield from _of_every_op(value, names, starred) if op else ()
            op = False
        if p.kind is p.KEYWORD_ONLY and not starred:
            yield from [NAME] if op and names.isdisjoint({"name"}) else []
            names.add("name")
            yield "*"
        starred = starred or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        annotation = of_caller(p.annotation, "TensorLike" if op else "", "TensorLike" if op else "Tensor")
        annotation = re.sub(r"\blist\[(TensorLike|Tensor)\]", r"Sequence[\1]", annotation)  # a list is invariant
        drawn = p.default is DRAWN and annotation == "Key"
        text = f"{star}{p.name}: {'Tensor | None' if drawn else annotation}"
        yield text if p.default is p.empty or star else f"{text} = {'...' if drawn else default(p.default)}"
    if op:
        if not starred and "name" not in names:
            yield NAME
            names.add("name")
        yield from _of_every_op(value, names, starred)


def _of_every_op(value: Callable[..., Any], names: set[str], starred: bool) -> Iterator[str]:
    code = value.__code__
    own = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]  # device=, of what creates
    extra = [e for e in EVERY_OP if e.split(":")[0] not in names]
    extra += [f"{n}: {'Any' if n == 'device' else 'bool'} = ..." for n in own if n not in names]
    yield from ([] if starred or not extra else ["*"]) + extra


def function(name: str, value: Callable[..., Any], indent: str = "") -> str:
    """The signature of a function, as its callers see it."""
    returned = of_caller(inspect.signature(value).return_annotation, "Tensor" if is_op(value) else "", "Tensor")
    if hasattr(value, "__wrapped__") and inspect.isgeneratorfunction(value.__wrapped__):  # a context manager
        returned = returned.replace("Iterator[", "AbstractContextManager[")
    return f"{indent}def {name}({', '.join(parameters(value))}) -> {returned}: ...\n"


def class_of(node: ast.ClassDef) -> str:
    """A class with the signatures of its methods."""
    bare = ast.ClassDef(node.name, node.bases, node.keywords, [], node.decorator_list, **_no_type_params(node))
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            part.body = [ast.Expr(ast.Constant(...))]
        elif isinstance(part, ast.AnnAssign) and part.value is not None:
            part.value = ast.Constant(...)
        elif isinstance(part, ast.Expr):
            continue
        bare.body.append(part)
    text = ast.unparse(ast.fix_missing_locations(bare)) + "\n"
    return re.sub(r"\bAnyTensor\b", "Tensor", text).replace("builtins.", "")


def _no_type_params(node: ast.ClassDef) -> dict[str, Any]:
    return {"type_params": []} if hasattr(node, "type_params") else {}


def constant(name: str, node: ast.Assign | ast.AnnAssign, value: Any) -> str:
    """What is no function: its declared type, itself if it is a type or another name, else its class."""
    if isinstance(node, ast.AnnAssign):
        return f"{name}: {ast.unparse(node.annotation)}\n"
    if isinstance(node.value, ast.Name) or hasattr(value, "__origin__"):
        return f"{name} = {ast.unparse(node.value)}\n"
    if isinstance(value, dict) and all(isinstance(v, str) for v in (*value, *value.values())):
        return f"{name}: dict[str, str]\n"
    kind = type(value)
    return f"{name}: {kind.__name__ if kind.__module__ == 'builtins' and kind not in (dict, tuple) else 'Any'}\n"


def asked_elsewhere() -> set[tuple[str, str]]:
    """(module, private name) pairs that files import from each other."""
    asked = set()
    for path in (ROOT / "polyreme").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not PRIVATE.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                asked |= {(node.module, a.name) for a in node.names if a.name.startswith("_")}
    return asked


def defined(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Names that a module defines, each with the last statement that does."""
    names: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
        elif isinstance(node, ast.Assign):
            names.update({t.id: node for t in node.targets if isinstance(t, ast.Name)})
    yield from names.items()


def imported(tree: ast.Module) -> dict[str, str]:
    """Name -> the statement that imports it."""
    statements = {}
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            start = f"from {node.module} import" if isinstance(node, ast.ImportFrom) else "import"
            for a in node.names:
                name = a.asname or a.name.split(".")[0]
                statements[name] = f"{start} {a.name}" + (f" as {a.asname}" if a.asname else "")
    return statements


def with_imports(text: str, known: dict[str, str], head: str) -> str:
    """A stub with the imports that its annotations want."""
    tree = ast.parse(text)
    own = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - own
    lines = sorted({known[name] for name in used if name in known}, key=lambda line: (line.split()[1], line))
    return head + "\n".join(lines) + ("\n\n" if lines else "") + text


def table(path: Path, private: set[tuple[str, str]]) -> str:
    """The stub of one op table."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    module, tree = importlib.import_module(name), ast.parse(path.read_text(encoding="utf-8"))
    parts = []
    for member, node in defined(tree):
        if member.startswith("_") and (name, member) not in private:
            continue
        value = getattr(module, member)
        if isinstance(node, ast.ClassDef):
            parts.append(class_of(node))
        elif inspect.isfunction(value):
            parts.append(function(member, value))
        elif isinstance(node, ast.FunctionDef):
            parts.append(f"{member}: Callable[..., Any]\n")  # wrapped by an object
        else:
            parts.append(constant(member, node, value))
    return with_imports("".join(parts), KNOWN | imported(tree), HEAD.format(what=name))


def methods() -> str:
    """The stub of eager/methods.py: every method that the op tables give Tensor."""
    lines = ["INPLACE: dict[str, Callable[..., Tensor]]\nALIASES: dict[str, str]\n\nclass OpMethods:\n"]
    known, sources = dict(KNOWN), set()
    for name, fn in sorted(vars(OpMethods).items()):
        if name.startswith("__") or not callable(fn):
            continue
        returned = (
            "Tensor"
            if name.endswith("_")
            else of_caller(inspect.signature(fn).return_annotation, "Tensor" if is_op(fn) else "", "Tensor")
        )
        lines.append(f"    def {name}({', '.join(['self', *parameters(fn, skip=1)])}) -> {returned}: ...\n")
        sources.add(str(importlib.import_module(fn.__module__).__file__))
    for source in sorted(sources):
        known = imported(ast.parse(Path(source).read_text(encoding="utf-8"))) | known
    return with_imports("".join(lines), known, HEAD.format(what="the methods that the op tables give Tensor"))


def casts() -> str:
    """The stub of eager/casts.py: a method for every dtype."""
    lines = ["CASTS: dict[str, np.dtype[Any]]\n\ndef type_as(self: Any, other: Any) -> Tensor: ...\n\nclass Casts:\n"]
    lines += [f"    def {name}(self) -> Tensor: ...\n" for name in CASTS]
    lines.append("    def type_as(self, other: Tensor) -> Tensor: ...\n")
    known = KNOWN | {"np": "import numpy as np"}
    return with_imports("".join(lines), known, HEAD.format(what="the methods of Tensor that are named after dtypes"))


def package(name: str) -> str:
    """The stub of a package whose names load when they are asked for: each imported from where it stands."""
    module = importlib.import_module(name)
    source = Path(str(module.__file__))
    written = imported(ast.parse(source.read_text(encoding="utf-8")))
    lazy = {n: home if home.startswith("polyreme.") else f"{name}.{home}" for n, home in _homes(module).items()}
    lines = [f"from {home} import {n} as {n}" for n, home in sorted(lazy.items(), key=lambda item: (item[1], item[0]))]
    loaded = getattr(module, "_SUBMODULES", None) or module.__all__
    children = (
        {m.name for m in pkgutil.iter_modules(module.__path__) if m.name in loaded} - lazy.keys() - written.keys()
    )
    lines += [f"from {name} import {child} as {child}" for child in sorted(children)]
    lines += [f"from {home} import *" for home in WHOLE.get(name, ())]
    written = {n: line for n, line in written.items() if n in getattr(module, "__all__", ()) and n not in lazy}
    lines += [line if " as " in line else f"{line} as {n}" for n, line in sorted(written.items())]
    if name == "polyreme":
        lines.append("\n__version__: str")
    return HEAD.format(what=f"where the names of {name} stand") + "\n".join(lines) + "\n"


def _homes(module: Any) -> dict[str, str]:
    if hasattr(module, "_homes"):
        return module._homes()
    return getattr(module, "_HOME", None) or getattr(module, "_LATE", {})


def main() -> dict[Path, str]:
    """Every stub by its path."""
    private = asked_elsewhere()
    tables = [p for p in sorted(TABLES.rglob("*.py")) if p.stem != "__init__"]
    stubs = {p.with_suffix(".pyi"): table(p, private) for p in tables}
    stubs[ROOT / "polyreme" / "eager" / "methods.pyi"] = methods()
    stubs[ROOT / "polyreme" / "eager" / "casts.pyi"] = casts()
    for name in LAZY:
        stubs[ROOT.joinpath(*name.split("."), "__init__.pyi")] = package(name)
    return stubs


if __name__ == "__main__":
    for path, text in main().items():
        path.write_text(text, encoding="utf-8")
