"""The programs in examples/ run as a new user would run them, to the accuracy they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
PADDLE = os.environ.get("POLYREME_TEST_PADDLE_PYTHON")
names = pytest.mark.parametrize("name", ["fashion_mnist.py", "fashion_mnist_fit.py"])


def accuracy(script, *args, python=sys.executable):
    env = os.environ | {"CPU_NUM": "1"}
    done = subprocess.run([python, script, *args], capture_output=True, text=True, timeout=240, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return float(re.search(r"test accuracy (\d\.\d+) on 1000 images", done.stdout)[1])


@pytest.mark.slow_cases("fashion_mnist.py")
@names
def test_example_learns_something_quickly(name):
    # ten classes: 0.1 by chance; 20 steps reach far more than twice that
    assert accuracy(EXAMPLES / name, "--epochs", "1", "--images", "1280") > 0.25


@pytest.mark.slow
@names
def test_example_reaches_its_accuracy(name):
    assert accuracy(EXAMPLES / name) > 0.8


@pytest.mark.oracle
@pytest.mark.skipif(PADDLE is None, reason="POLYREME_TEST_PADDLE_PYTHON names no interpreter with paddlepaddle")
def test_the_same_program_runs_in_paddle(tmp_path):
    text = (EXAMPLES / "fashion_mnist.py").read_text()
    changed = text.replace("import polyreme as paddle", "import paddle")
    assert changed != text
    data = f"DATA = Path({str(EXAMPLES.parent / 'data' / 'fashion_mnist')!r})"
    changed = re.sub(r"^DATA = .*$", lambda _: data, changed, flags=re.MULTILINE)
    (tmp_path / "program.py").write_text(changed)
    assert accuracy(tmp_path / "program.py", "--epochs", "1", python=PADDLE) > 0.5
