"""docs/pipeline.md: its code runs, in order, and says what it says."""

import re
from pathlib import Path

import pytest

from polyreme.distributed import fleet
from polyreme.distributed.placement import clear_plan

PAGE = (Path(__file__).parents[3] / "docs" / "pipeline.md").read_text()


@pytest.mark.slow
def test_every_block_runs(capsys):
    names = {"__name__": "page"}
    try:
        for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(code, "docs/pipeline.md", "exec"), names)
    finally:
        fleet.reset()
        clear_plan()
    assert names["proof"].holds
    # the mean of squares of sums of eight numbers of variance 1 is near 8 untrained
    assert float(capsys.readouterr().out) < 4
