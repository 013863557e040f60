"""set_verbosity, set_code_level and ignore_module do what they say."""

import subprocess
import sys
import types

import pytest

from polyreme import flags, jit
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CaptureError, ConfigError
from polyreme.jit import convert, verbosity


@pytest.fixture(autouse=True)
def _quiet_afterwards():
    level = verbosity.log.level
    yield
    jit.set_verbosity(0)
    jit.set_code_level(0)
    verbosity.log.setLevel(level)
    convert._ignored.modules.clear()


def choose(x):
    if x.sum() > 0:
        return x + 1
    return x - 1


def captured():
    return jit.to_static(choose)(to_tensor([1.0])).tolist()


def test_code_is_shown_after_the_step_asked_for(capsys):
    captured()
    jit.set_code_level(also_to_stdout=True)
    assert captured() == [2.0]  # converted again, to be shown
    last = capsys.readouterr().out
    assert "choose after step 9 of 9:" in last
    assert "ag__.if_stmt" in last
    jit.set_code_level(1, also_to_stdout=True)
    captured()
    first = capsys.readouterr().out
    assert "choose after step 1 of 9:" in first
    assert "ag__.if_stmt" not in first
    jit.set_code_level(0)
    captured()
    assert capsys.readouterr().out == ""


def test_levels_of_the_log(capsys):
    said = []
    for level in (0, 1, 2):
        convert._factories.clear()
        jit.set_verbosity(level, also_to_stdout=True)
        captured()
        said.append(capsys.readouterr().out)
    assert said[0] == ""
    assert "capturing" in said[1]
    assert "converted" not in said[1]
    assert "converted the control flow of" in said[2]


def test_the_environment_says_the_same():
    code = "import polyreme.jit.verbosity as v; print(v.log.level, v.told.code)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"TRANSLATOR_VERBOSITY": "1", "TRANSLATOR_CODE_LEVEL": "3", "PATH": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["20", "3"]
    assert flags.translator_verbosity() == 0


def test_functions_of_an_ignored_module_run_as_written():
    module = types.ModuleType("somebodys")
    exec("def choose(x):\n    return x + 1 if x.sum() > 0 else x", module.__dict__)
    mine = types.ModuleType(__name__)
    jit.ignore_module([mine, module])
    with pytest.raises(CaptureError, match="needs the value on the host"):
        captured()
    assert "somebodys.inner" in convert._ignored
    assert "somebodyself" not in convert._ignored
    convert._ignored.modules.clear()
    assert captured() == [2.0]


def test_what_is_no_level_or_module_is_refused():
    for call in (jit.set_verbosity, jit.set_code_level):
        with pytest.raises(ConfigError, match="level='high'; give a number from 0"):
            call("high")
    with pytest.raises(TypeError, match="takes a list of modules, got str"):
        jit.ignore_module(["numpy"])
