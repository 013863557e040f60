"""House rules CI can check: what imports what. The floors live here and nowhere else."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "polyreme"
FLOORS = [
    "errors flags faults host_random version mesh kernels",
    "planner",
    "core",
    "ops",
    "eager",
    "jit",
    "nn optimizer amp autograd io metric regularizer device cuda linalg fft signal special functional random sparse "
    "geometric reader program export",
    "vision text audio distribution incubate hub",
    "distributed hapi callbacks inference dataset",
    "models",
    "recipes",
    "utils sysconfig static fluid root api compat",
    "cli paddle_scripts __main__",
]
"""Lowest first. jit stands above eager because a captured function is a node of the tape."""
RANK = {module: floor for floor, modules in enumerate(FLOORS) for module in modules.split()}
FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")
# the one place that reads optional things late, so that --help needs no jax
LATE_IMPORTS = {"cli"}
# packages whose module has another name, and those that come with jax
DISTRIBUTIONS = {"malt": "diastatic-malt", "yaml": "pyyaml", "jaxlib": "jax", "ml_dtypes": "jax"}


def package(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module:
        if node.module == "polyreme":
            return [f"polyreme.{a.name}" for a in node.names]
        return [node.module]
    return [a.name for a in node.names] if isinstance(node, ast.Import) else []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "a file says on its first line what it holds"
    for node in ast.walk(tree):
        for module in modules(node):
            assert not module.startswith("jax._src"), f"line {node.lineno}: {module} is private to jax"
            if not module.startswith("polyreme."):
                continue
            assert module.split(".")[1] in RANK, f"line {node.lineno}: {module} has no floor; add it to FLOORS"
            assert RANK[module.split(".")[1]] <= RANK[package(path)], f"line {node.lineno}: {module} is a higher floor"
            late = node.col_offset > 0 and package(path) not in LATE_IMPORTS
            assert not late, f"line {node.lineno}: hidden import of {module}; move the code down a floor instead"


def test_no_file_names_the_folder_it_was_written_in():
    for path in FILES:
        assert str(ROOT.parent) + "/" not in path.read_text(), path


def test_every_package_imported_on_import_is_a_dependency():
    """One that merely lies in a developer's environment is missing on a fresh machine."""
    declared = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    known = {re.split(r"[<>=\[]", requirement)[0] for requirement in declared} | {"polyreme"} | sys.stdlib_module_names
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            for module in modules(node):
                package_name = module.split(".")[0]
                assert DISTRIBUTIONS.get(package_name, package_name) in known, f"{path}:{node.lineno}: {module}"
