"""The table of options in docs/deployment.md leaves none out."""

import re
from fnmatch import fnmatch
from pathlib import Path

from polyreme.inference.options import ACCEPTED

TEXT = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()


def test_every_option_without_effect_is_listed():
    listed = [name for line in TEXT.splitlines() if "no effect" in line for name in re.findall(r"`([a-z_*]+)`", line)]
    assert [name for name in ACCEPTED if not any(fnmatch(name, pattern) for pattern in listed)] == []
