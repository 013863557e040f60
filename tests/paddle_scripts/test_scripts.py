"""Scripts written for PaddlePaddle, run unchanged: they print what they print there.

Fluid is gone from PaddlePaddle: a Fluid script checks its numbers by NumPy itself, or does what another one does.
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from polyreme import disable_static, static
from polyreme.core import unique_name
from polyreme.paddle_scripts import as_paddle

_FOLDER = Path(__file__).parent / "scripts"
SCRIPTS = sorted(_FOLDER.glob("*.py"))
FAMILIES = sorted((_FOLDER / "families").glob("*.py"))
"""One or more for each family of public projects, in their manner."""
PADDLE = os.environ.get("POLYREME_TEST_PADDLE_PYTHON")
_NUMBER = re.compile(r"-?\d+\.\d+")
# numbers are printed with 3 to 5 digits after the point: the last may round to either side
_LAST_DIGIT = 1.01
# these write their programs as Paddle's own guides do, for Paddle's older program format
_ENV = {script: {"FLAGS_enable_pir_api": "0"} for script in ("static_regression", "book_word2vec")}
_SAME_AS = {"fluid_word2vec": "book_word2vec"}


def output(command: list[str], **env: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **env}, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def assert_as_recorded(got: str, script: Path) -> None:
    """Equal texts, but for the last digit of numbers."""
    want = script.with_name(_SAME_AS.get(script.stem, script.stem) + ".txt").read_text()
    assert _NUMBER.sub("N", got) == _NUMBER.sub("N", want)
    for a, b in zip(_NUMBER.findall(got), _NUMBER.findall(want), strict=True):
        assert abs(float(a) - float(b)) <= _LAST_DIGIT * 10 ** -len(b.partition(".")[2]), (a, b)


@pytest.mark.slow_cases(
    "captured", "deep_imports", "fluid_fit_a_line", "loader_workers", "model_fit", "own_backward", "static_regression"
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_a_script_prints_what_it_prints_in_paddle(script):
    got = output([sys.executable, "-m", "polyreme.cli.main", "run", str(script)])
    assert_as_recorded(got, script)


@pytest.mark.slow_cases(
    "detection_fpn",
    "diffusion_unet",
    "ocr_crnn",
    "protein_evoformer",
    "science_pinn",
    "speech_keywords",
    "nlp_bert_finetuning",
    "segmentation_ohem",
    "recommendation_deepfm",
)
@pytest.mark.parametrize("script", FAMILIES, ids=lambda s: s.stem)
def test_a_familys_script_prints_what_it_prints_in_paddle(script, capsys):
    """In this process: another one takes longer to start than the script to run."""
    try:
        with as_paddle(), unique_name.guard(), static.scope_guard(static.Scope()):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        disable_static()
    assert_as_recorded(capsys.readouterr().out, script)


@pytest.mark.oracle
@pytest.mark.skipif(PADDLE is None, reason="POLYREME_TEST_PADDLE_PYTHON names no interpreter with paddlepaddle")
@pytest.mark.parametrize(
    "script", [s for s in SCRIPTS + FAMILIES if not s.stem.startswith("fluid_")], ids=lambda s: s.stem
)
def test_paddle_prints_what_is_recorded(script):
    got = output([PADDLE, "-W", "ignore", str(script)], **_ENV.get(script.stem, {}))
    assert_as_recorded(got, script)
