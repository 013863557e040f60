"""House rules CI can check: what imports what. The floors live here and nowhere else."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from polyreme.mesh import SCHEDULES
from polyreme.models.families import FAMILIES
from tests.house import LONG, Source, Tree, cycles

ROOT = Path(__file__).parent.parent / "polyreme"
FLOORS = {
    "polyreme": [
        "call_site errors flags faults jax_import host_random registry units version module_alias "
        "module_names keyword_names stand_ins system_memory yaml_loader mesh kernels",
        "planner",
        "core",
        "ops fusion",
        "eager",
        "jit",
        "nn optimizer amp autograd io metric regularizer device cuda linalg fft signal special functional random "
        "sparse geometric reader program paddle_models export",
        "training quantization",
        "vision text audio distribution hub profiler sequences data",
        "distributed hapi callbacks inference dataset",
        "models incubate",
        "generation compression",
        "evaluation",
        "conformance",
        "recipes",
        "serving trainer",
        "dashboard",
        "utils sysconfig static fluid root api compat torch_scripts",
        "cli paddle_scripts __main__",
    ],
    "polyreme.eager": [
        "casts host index memory tape walk dist_members",
        "dispatch forward mode",
        "sparse checked methods rewriting views",
        "tensor",
        "dlpack typed",
    ],
    "polyreme.nn": [
        "argument_order attention clip functional hooks parameter second_names initializer",
        "init parameter_entry",
        "layer lazy",
        "eval_mode layers summary alike",
        "flops quant reweighted utils",
    ],
    "polyreme.distributed": [
        "comm_report job settings spawning",
        "launch",
        "communication",
        "checkpoint parallel placement gradient_merge recompute_calls",
        "data_parallel models tasks tensor_parallel",
        "utils protein_folding",
        "planned_model",
        "pipeline",
        "whole_step",
        "planned_step",
        "auto_parallel",
        "fleet",
        "fsdp prove sharding splitting unshard",
        "api",
    ],
    "polyreme.distributed.auto_parallel": ["dims tensors", "layers", "stages", "engine", "api"],
    "polyreme.distributed.fleet": [
        "base layers local_fs recompute",
        "fleet optimizer utils wrappers",
        "meta_optimizers meta_parallel scaler",
        "model",
    ],
    "polyreme.recipes": [
        "samples preference_losses pictures doctor corpus shipped",
        "stages config",
        "finetune_config",
        "config_file estimate",
        "weights",
        "data",
        "inference",
        "training",
        "planning profiling",
    ],
    "polyreme.models": [
        "files tokenizer",
        "families",
        "pretrained",
        "parts auto",
        "decoders encoders encoder_decoders",
        "experts vision",
        "vision_language",
    ],
    "polyreme.vision": ["image models", "ops datasets transforms"],
}
"""Packages whose parts have an order, lowest floor first. jit stands above eager because a captured function is a node
of the tape. A package that is not here may order its parts as it likes, without cycles."""
CYCLES: set[tuple[str, ...]] = set()
"""Cycles between parts of a package that are still to be undone."""
PUBLIC_ABOVE = {("polyreme.jit", "polyreme.export"), ("polyreme.models", "polyreme.generation")}
"""Packages whose public names stand on a higher floor, and are loaded when one is asked for."""
# loaded when needed: --help wants no jax, loader workers have none, scripts choose which module of a name they mean
LATE_IMPORTS = (
    "polyreme.cli.",
    "polyreme.audio.datasets",
    "polyreme.vision.transforms.classes",
    "polyreme.torch_scripts",
)
# what loads without jax (for --help, loader workers, plans for devices that are not there), and the parts that do not
JAX_FREE = {
    "polyreme.call_site": "",
    "polyreme.cli": "",
    "polyreme.data": "",
    "polyreme.dataset": "",
    "polyreme.distributed.job": "",
    "polyreme.distributed.launch": "",
    "polyreme.errors": "",
    "polyreme.faults": "",
    "polyreme.flags": "",
    "polyreme.host_random": "",
    "polyreme.mesh": "",
    "polyreme.paddle_scripts": "internals",
    "polyreme.models.families": "",
    "polyreme.models.tokenizer": "",
    "polyreme.planner": "",
    "polyreme.registry": "",
    "polyreme.text.datasets": "",
    "polyreme.units": "",
    "polyreme.version": "",
    "polyreme.yaml_loader": "",
    "polyreme.vision.datasets": "",
    "polyreme.vision.transforms": "tensor",
}
# public paths of what stands elsewhere: they re-export, and define nothing
FACADES = (
    "polyreme.callbacks",
    "polyreme.distributed.api",
    "polyreme.distributed.auto_parallel.api",
    "polyreme.distributed.fleet.layers",
    "polyreme.distributed.fleet.meta_optimizers",
    "polyreme.distributed.fleet.meta_parallel",
    "polyreme.distributed.fleet.recompute",
    "polyreme.distributed.fleet.utils",
    "polyreme.fft",
    "polyreme.functional",
    "polyreme.signal",
    "polyreme.special",
)
# packages that say in the public API's words what others do, and import none of what computes
COMPUTING = ("autograd", "core", "eager", "jit", "kernels", "ops")
SAYING = ("polyreme.distributed.fleet",)
SPELLED_TWICE = """
Assign Attention AvgPool1D AvgPool2D AvgPool3D BatchNorm Bilinear Block Conv2D Conv3D ExponentialMovingAverage
FeedForward Hessian Jacobian LRScheduler LeakyReLU Linear MaxPool3D Normal ReLU ReLU6 Softmax Strategy SyncBatchNorm
Tensor Trainer Unfold Uniform
"""
"""Names that the public API, or the file of a Program, gives to several classes; Layers of models name parameters."""
OLD_NAMES = ROOT / "fluid"
"""Where classes have the names of an older API, whatever polyreme calls by them."""
# packages whose module has another name, and those that come with jax
DISTRIBUTIONS = {"malt": "diastatic-malt", "yaml": "pyyaml", "jaxlib": "jax", "ml_dtypes": "jax", "scipy": "jax"}


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(ROOT)


def list_all(breaches) -> None:
    """Fail with every breach, a line each."""
    breaches = sorted({str(b).replace(f"{ROOT.parent}/", "") for b in breaches})
    assert not breaches, "\n" + "\n".join(breaches)


def floor_breaches(tree: Tree, floors: dict[str, list[str]]):
    for package, levels in floors.items():
        rank = {name: floor for floor, names in enumerate(levels) for name in names.split()}
        children = {source.module[len(package) + 1 :].split(".")[0] for source in tree.below(package)}
        yield from (f"{package}.{name} has no floor; add it to FLOORS" for name in children - rank.keys())
        yield from (f"FLOORS[{package!r}] names {name}, which is not there" for name in rank.keys() - children)
        for (child, other), places in tree.edges(package, PUBLIC_ABOVE).items():
            if rank.get(child, -1) < rank.get(other, -1):
                yield from (f"{place}: {package}.{other} is a higher floor than {child}" for place in places)


def cycle_breaches(tree: Tree):
    for package in tree.packages:
        links = tree.edges(package, PUBLIC_ABOVE)
        for group in cycles(links):
            if (package, *group) not in CYCLES:
                inside = [f"{a} -> {b} ({p[0]})" for (a, b), p in links.items() if a in group and b in group]
                yield f"{package}: parts import each other: {'; '.join(inside)}"


def import_breaches(source: Source):
    for link in source.imports:
        place = f"{source.path}:{link.line}"
        if link.module.startswith("jax._src"):
            yield f"{place}: {link.module} is private to jax"
        if not link.module.startswith("polyreme.") or source.module == "polyreme":
            continue
        # a package may load its names when they are asked for; all else does when it is loaded itself
        may_wait = source.module.startswith(LATE_IMPORTS) or (source.is_package and (link.literal or link.type_only))
        if (link.late or link.type_only) and not may_wait:
            yield f"{place}: hidden import of {link.module}; move the code down a floor instead"


def test_every_file_says_what_it_holds(tree):
    list_all(f"{s.path}: no docstring on its first line" for s in tree.sources.values() if not s.has_docstring)


def test_imports_go_down(tree):
    list_all(floor_breaches(tree, FLOORS))


def test_no_import_is_hidden(tree):
    list_all(breach for source in tree.sources.values() for breach in import_breaches(source))


def test_packages_have_no_cycles(tree):
    list_all(cycle_breaches(tree))


def test_jax_is_loaded_only_where_it_may_be(tree):
    free = tree.without("jax")
    for package, parts in JAX_FREE.items():
        inside = {source.module for source in tree.below(package)} | {package}
        for part in (f"{package}.{name}" for name in parts.split()):
            loads = {name for name in inside if name == part or name.startswith(part + ".")}
            list_all(f"{part} loads no jax: take it from JAX_FREE" for _ in [part] if loads <= free)
            inside -= loads
        list_all(f"{name} loads jax, which {package} does without" for name in inside - free)


def name_breaches(source: Source, names: re.Pattern[str], instead: str):
    """Strings with one of these names in them. What stands as a statement, a docstring, is for readers and may."""
    if not names.search(source.text):
        return
    nodes = list(ast.walk(ast.parse(source.text)))
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            for name in names.findall(node.value):
                yield f"{source.path}:{node.lineno}: says {name!r}; {instead}"


def test_schedules_are_named_in_their_own_files_only(tree):
    """Code asks a schedule's record what it does; which one it is, a default included, is said in mesh.schedules."""
    names = re.compile(rf"\b(?:{'|'.join(map(re.escape, SCHEDULES))})\b")
    list_all(
        breach
        for source in tree.sources.values()
        if not source.module.startswith("polyreme.mesh.schedules.")
        for breach in name_breaches(source, names, "read it from mesh.SCHEDULES")
    )


def test_model_families_are_named_in_their_record_only(tree):
    names = re.compile(rf"^(?:{'|'.join(map(re.escape, FAMILIES))})$", re.M)
    quoted = re.compile(rf"[\"'](?:{'|'.join(map(re.escape, FAMILIES))})[\"']")
    list_all(
        breach
        for source in tree.sources.values()
        if source.module != "polyreme.models.families" and quoted.search(source.text)
        for breach in name_breaches(source, names, "read it from models.families.FAMILIES")
    )


def facade_breaches(source: Source):
    for node in ast.parse(source.text).body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_list = isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]
        is_answer = ast.unparse(node) == "suggest_names(__name__)"  # to a name that it does not re-export
        if not (is_text or is_list or is_answer or isinstance(node, (ast.Import, ast.ImportFrom))):
            yield f"{source.path}:{node.lineno}: a facade defines something; move it where it belongs and re-export it"


def test_facades_only_re_export(tree):
    facades = [s for name, s in tree.sources.items() if any(f"{name}.".startswith(f"{f}.") for f in FACADES)]
    list_all(breach for source in facades for breach in facade_breaches(source))


def test_what_says_a_plan_does_not_compute(tree):
    computing = tuple(f"polyreme.{name}." for name in COMPUTING)
    list_all(
        f"{source.path}:{link.line}: imports {link.module}; move what computes below {package}"
        for package in SAYING
        for source in tree.below(package)
        for link in source.imports
        if f"{link.module}.".startswith(computing)
    )


def class_breaches(tree: Tree):
    places: dict[str, list[str]] = {}
    for source in tree.sources.values():
        if source.path.is_relative_to(OLD_NAMES):
            continue
        for name, line in source.classes:
            places.setdefault(name, []).append(f"{source.path}:{line}")
    allowed = SPELLED_TWICE.split()
    several = {name for name, where in places.items() if len(where) > 1}
    yield from (f"{name} is {len(places[name])} classes: {', '.join(places[name])}" for name in several - {*allowed})
    yield from (f"SPELLED_TWICE lists {name}, which is one class or none" for name in {*allowed} - several)


def test_a_name_is_one_class(tree):
    list_all(class_breaches(tree))


VAGUE_TEST = re.compile(
    r"^\s*def (test_(?:all|basics?|errors?|it|misc|others?|other_errors|simple|the_rest|works))\(", re.M
)


def untold_breaches(tree: Tree):
    for source in tree.sources.values():
        for name in VAGUE_TEST.findall(source.text):
            yield f"{source.path}: {name} does not say what is tested"
        for name, line in source.untold:
            yield f"{source.path}:{line}: {name!r} lives over {LONG} lines; say what it is"


def untold_attributes(tree: Tree):
    for source in tree.sources.values():
        for name, line in source.untold_attributes:
            yield f"{source.path}:{line}: an attribute named {name!r}; say what it is"


def test_locals_and_tests_say_what_they_are(tree):
    around = [Tree(ROOT.parent / name) for name in ("tests", "benchmarks", "tools")]
    list_all(breach for each in (tree, *around) for breach in untold_breaches(each))
    list_all(untold_attributes(tree))


def test_no_file_names_the_folder_it_was_written_in(tree):
    list_all(str(s.path) for s in tree.sources.values() if str(ROOT.parent) + "/" in s.text)


def test_every_package_imported_on_import_is_a_dependency(tree):
    """One that merely lies in a developer's environment is missing on a fresh machine."""
    declared = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    known = {re.split(r"[<>=\[]", requirement)[0] for requirement in declared} | {"polyreme"} | sys.stdlib_module_names
    list_all(
        f"{source.path}:{link.line}: {link.module} is no dependency"
        for source in tree.sources.values()
        for link in source.imports
        if link.required
        if DISTRIBUTIONS.get(name := link.module.split(".")[0], name) not in known
    )


def write_tree(root: Path, files: dict[str, str]) -> Tree:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(root)


def test_each_breach_is_seen(tmp_path):
    tree = write_tree(
        tmp_path / "polyreme",
        {
            "low.py": "from polyreme import high\n",
            "high.py": "import jax._src.core\ndef f():\n    import polyreme.low\n",
            "ring/a/x.py": "from polyreme.ring.b import y\n"
            "def f(given):\n    made = given\n\n\n\n    at = 1\n    return [at for at in made]\n"
            "def test_works(): ...\n",
            "ring/b/y.py": "import importlib\nimportlib.import_module('polyreme.ring.a.x')\n",
            "new.py": "class Twice: ...\nclass Twice: ...\n",
        },
    )
    floors = list(floor_breaches(tree, {"polyreme": ["low", "ring", "high", "gone"]}))
    assert [re.sub(r"^.*/", "", breach) for breach in floors] == [
        "polyreme.new has no floor; add it to FLOORS",
        "FLOORS['polyreme'] names gone, which is not there",
        "low.py:1: polyreme.high is a higher floor than low",
    ]
    assert any("polyreme.ring: parts import each other: a -> b" in breach for breach in cycle_breaches(tree))
    hidden = [breach for source in tree.sources.values() for breach in import_breaches(source)]
    assert [breach.split(": ")[1].split(";")[0] for breach in hidden] == [
        "jax._src.core is private to jax",
        "hidden import of polyreme.low",
        "hidden import of polyreme.ring.a.x",
    ]
    text = 'def f():\n    """VPP is fine here."""\n    return "VPP", f"{f} of VPP", "MVPP"\n'
    named = write_tree(tmp_path / "other", {"x.py": text}).sources["other.x"]
    assert [b.split(": ")[1] for b in name_breaches(named, re.compile(r"\bVPP\b"), "")] == ["says 'VPP'; "] * 2
    assert any(breach.startswith("Twice is 2 classes") for breach in class_breaches(tree))
    assert [breach.split(":")[1] for breach in facade_breaches(tree.sources["polyreme.new"])] == ["1", "2"]
    assert list(facade_breaches(tree.sources["polyreme.low"])) == []
    assert [breach.split(": ")[1].split()[0] for breach in untold_breaches(tree)] == ["test_works", "'made'"]
    assert tree.without("jax") == {"polyreme.new", "polyreme.ring.a.x", "polyreme.ring.b.y"}
