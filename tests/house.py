"""Facts of a tree of sources, each file parsed once: docstring, imports, late imports, classes, names of locals."""

from __future__ import annotations

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

_LATE_IMPORT = re.compile(r"\b(?:import_module|__import__)\s*\(")
SAYS_NOTHING = frozenset(("at", "each", "found", "given", "held", "kept", "made", "on", "own"))
"""Words that say that there is a thing, not what it is."""
LONG = 5
"""Lines over which such a word may be a local's name."""
_IS_BOUND = re.compile(rf"\b(?:{'|'.join(SAYS_NOTHING)})\b\s*(?:[,:)\]]|=(?!=)|in\b)")
_IS_ATTRIBUTE = re.compile(rf"\bself\._?({'|'.join(SAYS_NOTHING)})(?:: [^=\n]+)? = ")
_SCOPES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


@dataclass(frozen=True)
class Import:
    """One imported module. late: not when its file is loaded. literal: named by a string, for import_module. tried: the
    file loads without it."""

    module: str
    line: int
    late: bool = False
    literal: bool = False
    tried: bool = False
    type_only: bool = False

    @property
    def required(self) -> bool:
        """True if the file does not load where the module is not there."""
        return not (self.late or self.tried or self.type_only)


@dataclass
class Source:
    """One file of a tree."""

    path: Path
    module: str
    text: str
    has_docstring: bool
    imports: list[Import] = field(default_factory=list)
    classes: list[tuple[str, int]] = field(default_factory=list)
    untold: list[tuple[str, int]] = field(default_factory=list)
    untold_attributes: list[tuple[str, int]] = field(default_factory=list)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


class Tree:
    """The sources below a package's folder, by module name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = sorted(root.rglob("*.py"))
        names = {_module_name(root, path): path for path in paths}
        gc.disable()  # nodes of a tree go as soon as its facts are taken; looking for cycles among them takes longer
        try:
            self.sources = {name: _read(name, path, names) for name, path in names.items()}
        finally:
            gc.enable()

    @cached_property
    def packages(self) -> list[str]:
        """Names that have modules below them, with an __init__ or without."""
        return sorted({package for name in self.sources for package in _parents(name)})

    def below(self, package: str) -> Iterator[Source]:
        """The sources of a package, those of its sub-packages with them, its own __init__ not."""
        return (s for name, s in self.sources.items() if name.startswith(package + "."))

    def edges(self, package: str, allowed: Collection[tuple[str, str]] = ()) -> dict[tuple[str, str], list[str]]:
        """Who imports whom among the direct children of a package: (child, child) -> "file:line" of each import.

        allowed: pairs of a package, and of another whose names its __init__ may load late; they do not count.
        """
        links: dict[tuple[str, str], list[str]] = defaultdict(list)
        for source in self.below(package):
            child = _child(source.module, package)
            for link in source.imports:
                if link.literal and any(source.module == a and link.module.startswith(b) for a, b in allowed):
                    continue
                other = _child(link.module, package)
                if other is not None and other != child:
                    links[child, other].append(f"{source.path}:{link.line}")
        return links

    def without(self, distribution: str) -> set[str]:
        """Modules that load without a package from outside, with all that their imports load."""
        loads: dict[str, bool] = {}

        def needs(name: str) -> bool:
            if name not in loads:
                loads[name] = False  # what a cycle needs, another of its modules says
                source = self.sources[name]
                now = [i.module for i in source.imports if not (i.late or i.type_only)]
                packages = {p for module in (name, *now) for p in _parents(module)} & self.sources.keys()
                inside = ({*now} & self.sources.keys() | packages) - {name}
                loads[name] = any(m.split(".")[0] == distribution for m in now) or any(map(needs, sorted(inside)))
            return loads[name]

        return {name for name in self.sources if not needs(name)}


def cycles(links: Mapping[tuple[str, str], object]) -> list[list[str]]:
    """Groups of nodes that reach one another, of the edges given as pairs."""
    after: dict[str, set[str]] = defaultdict(set)
    for node, other in links:
        after[node].add(other)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [*after[start]]
        while ahead:
            node = ahead.pop()
            if node not in seen:
                seen.add(node)
                ahead += after[node]
        return seen

    reach = {node: reached(node) for node in list(after)}
    groups = {tuple(sorted(o for o in reach[n] if n in reach.get(o, ()))) for n in reach if n in reach[n]}
    return [list(group) for group in sorted(groups)]


def _module_name(root: Path, path: Path) -> str:
    parts = (root.name, *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _child(module: str, package: str) -> str | None:
    if not module.startswith(package + "."):
        return None
    return module[len(package) + 1 :].split(".")[0]


def _read(name: str, path: Path, names: Mapping[str, Path]) -> Source:
    text = path.read_text()
    tree = ast.parse(text)
    source = Source(path, name, text, ast.get_docstring(tree) is not None)
    _visit(tree.body, source, names, Import(name, 0))
    for scope in _scopes_to_read(tree, text):
        _free_names(scope, source.untold)
    for match in _IS_ATTRIBUTE.finditer(text):
        source.untold_attributes.append((match[1], text.count("\n", 0, match.start()) + 1))
    if _LATE_IMPORT.search(text):
        root = name.split(".")[0]
        for node in ast.walk(tree):
            strings = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if strings and re.fullmatch(rf"{root}\.[a-z0-9_.]+", node.value):
                module = node.value.rstrip(".")
                source.imports.append(Import(module, node.lineno, late=True, literal=True))
    return source


def _scopes_to_read(tree: ast.Module, text: str) -> list[ast.AST]:
    """The functions and classes of a file that may bind a name that says nothing; the file itself if it does."""
    lines = [text.count("\n", 0, match.start()) + 1 for match in _IS_BOUND.finditer(text)]
    scopes: list[ast.AST] = []
    for node in tree.body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        if not any(first <= line <= (node.end_lineno or first) for line in lines):
            continue
        if isinstance(node, _SCOPES):
            scopes.append(node)
        elif any(isinstance(n, ast.Name) and n.id in SAYS_NOTHING for n in ast.walk(node)):
            return [tree]
    return scopes


def _free_names(scope: ast.AST, untold: list[tuple[str, int]]) -> dict[str, int]:
    """Last line of each name that a scope reads and does not bind; its locals that are untold long go to the list."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    nodes = list(ast.iter_child_nodes(scope))
    for node in nodes:
        if isinstance(node, _SCOPES):
            for name, line in _free_names(node, untold).items():
                last[name] = max(line, last.get(name, 0))
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Name):
            last[node.id] = max(node.lineno, last.get(node.id, 0))
            if isinstance(node.ctx, ast.Store):
                first[node.id] = min(node.lineno, first.get(node.id, node.lineno))
    parameters = {node.arg for node in nodes if isinstance(node, ast.arg)}
    untold += [(n, i) for n, i in first.items() if n in SAYS_NOTHING - parameters and last[n] - i >= LONG]
    return {name: line for name, line in last.items() if name not in first and name not in parameters}


def _visit(body: list[ast.stmt], source: Source, names: Mapping[str, Path], link: Import) -> None:
    """Statements alone: imports and classes are in no expression. link: how an import at this place counts."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else _from(node, names)
            source.imports += [replace(link, module=m, line=node.lineno) for m in modules]
            continue
        if isinstance(node, ast.ClassDef):
            source.classes.append((node.name, node.lineno))
            fields = (part.target for part in node.body if isinstance(part, ast.AnnAssign))
            source.untold_attributes += [
                (name.id, name.lineno)
                for name in fields
                if isinstance(name, ast.Name) and name.id.lstrip("_") in SAYS_NOTHING
            ]
        late = link.late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, None)
            if not inner:
                continue
            tried = link.tried or (name == "body" and isinstance(node, ast.Try))
            type_only = link.type_only or (name == "body" and isinstance(node, ast.If) and _asks_for_types(node.test))
            _visit(inner, source, names, replace(link, late=late, tried=tried, type_only=type_only))


def _from(node: ast.ImportFrom, names: Mapping[str, Path]) -> list[str]:
    """A module that is imported by name from its package counts as itself."""
    module = node.module or ""
    return sorted({full if (full := f"{module}.{a.name}") in names else module for a in node.names})


def _asks_for_types(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
