"""The root namespace: the generated file is current, every op can be reached, importing stays cheap."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import polyreme as paddle
from polyreme.core.op import OPS

ROOT = Path(__file__).parent.parent


def _tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_root_names_are_those_of_the_op_tables():
    expected = {n for n in _tool("write_api").root_names() if not n.startswith("_")}
    assert expected - set(dir(paddle)) == set(), "run: python tools/write_api.py"


def test_every_listed_name_exists():
    for name in dir(paddle):
        assert getattr(paddle, name) is not None or name == "newaxis"


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(AttributeError, match="did you mean 'reshape'"):
        paddle.reshap  # noqa: B018


def test_importing_the_package_does_not_load_jax():
    code = "import sys, polyreme; assert 'jax' not in sys.modules; polyreme.Tensor; assert 'jax' in sys.modules"
    code += "; polyreme.nn.Linear; assert 'jax.experimental.pallas' not in sys.modules"  # for GPUs alone
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fft", "signal", "linalg", "special", "functional", "sparse", "geometric", "distribution"]
)
def test_a_namespace_of_ops_works_when_it_is_what_is_imported_first(name):
    code = f"import polyreme.{name}; from polyreme.core.mode import current; assert current.mode"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_op_has_a_docstring_with_a_sentence():
    for name, fn in OPS.items():
        first = fn.__doc__.strip().splitlines()[0]
        assert first.rstrip().endswith((".", ":", ";")) or len(fn.__doc__.splitlines()) > 1, f"{name}: {first!r}"


def test_the_stubs_are_current():
    stale = [str(p.relative_to(ROOT)) for p, text in _tool("write_stubs").main().items() if p.read_text() != text]
    assert not stale, "run: python tools/write_stubs.py"


def test_a_stub_says_what_callers_give_and_get():
    stub = (ROOT / "polyreme" / "ops" / "arithmetic.pyi").read_text()
    given = "x: TensorLike, dtype: DTypeLike, name: str | None = None, *, out: Tensor | None = None"
    assert f"def cast({given}) -> Tensor: ..." in stub
