"""Writes docs/errors.md: every error class with its code, cause and cure, below what all of them have in common.

Run it from the root after a class of polyreme/errors.py changed: `python -m tools.write_errors`.
tests/test_errors.py fails when the page is out of date, and runs its examples.
"""

# ruff: noqa: E501  (the page shows messages as they are, in one line)

from __future__ import annotations

import textwrap
from pathlib import Path

from polyreme.cli.explain import facts
from polyreme.errors import error_classes

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
HEAD = """# Errors

Every error that polyreme raises of its own says in its message what was asked, what was got and what to change. It is
a class of `polyreme.errors`, a subclass of the builtin that Python code expects, and has a code, which the last line
names; `polyreme explain CODE` tells the cause and the cure that are on this page. On the command line an error is the
line that begins with `error:`, the notes below it, and an exit code; `--debug` shows the traceback too.

## Where it was

A shape or dtype that does not fit inside a Layer is told with the layer's path in the model and your line, in eager
code, in code that `to_static` captures and while a Program is recorded; a Program that runs names the operation, and
where that was recorded. Nothing is kept for it while all goes well: the path is read from the interpreter's frames
when the error is made, or a Program's operation is recorded.

```python
import traceback

import polyreme as paddle
from polyreme import nn


class FFN(nn.Layer):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(12, 8)  # 12 should be 16

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


model = nn.Sequential(("blocks", nn.Sequential(("0", FFN()), ("1", FFN()))))
try:
    model(paddle.ones([2, 8]))
except ValueError as error:
    print("".join(traceback.format_exception_only(error)))
```

    polyreme.errors.ShapeError: linear: x [2, 16] and weight [12, 8] do not fit; the last dim of x must equal the first of a 2-D weight [in, out]
    in layer blocks.0.down (Linear) of Sequential, page.py:13: return self.down(nn.functional.gelu(self.up(x)))
    more: polyreme explain PR101

## Out of memory

A `DeviceMemoryError` is a `MemoryError` that names the op, the captured function or the pipeline's program (and the
layer, where the op runs at once), the bytes that were asked for (`asked`), what lies on the fullest device by part
(`parts`), and three changes with what each would save, the least loss of speed first. It is raised by eager and
captured code and by `Model.fit` alike. `polyreme pretrain` and `finetune` say what the planner predicts for settings
of that configuration:

    error: out of memory in program last_backward: 2.1 GiB more asked for. On cuda:0 lie 74.2 GiB of 75.0 GiB: parameters ...
    The cheapest changes, as the planner predicts: 1) train.amp_level=O1: 9.1 GiB a device less; 2) train.accumulation=4: ...
    more: polyreme explain PR105

Large arrays that only wait to be collected count as "other". On CPU XLA allocates when a program runs, which may be
after the call that started it: the op that is named is then the first one that had to wait for it.

## Names that are not there

An attribute of a public module, a key of a configuration, a command, an option, a task, a schedule: the answer says
the nearest one that there is.

```python
import polyreme.nn.functional as F

try:
    F.relo
except AttributeError as error:
    print(error)
```

    module 'polyreme.nn.functional' has no attribute 'relo'; did you mean 'relu'?

## All of them

"""


def page() -> str:
    """The page as it should be."""
    classes = [facts(kind) for kind in error_classes()]
    rows = ["| code | class | is a | exit code | what it is |", "|---|---|---|---|---|"]
    rows += [
        f"| [{f['code']}](#{str(f['code']).lower()}) | `{f['name']}` | `{f['is_a']}` | {f['exit_code'] or ''} | "
        f"{f['meaning']} |"
        for f in classes
    ]
    sections = [
        f"### {f['code']}\n\n`{f['name']}`. {_filled(str(f['cause']))}\n\n{_filled('What helps: ' + str(f['cure']))}"
        for f in classes
    ]
    return HEAD + "\n".join(rows) + "\n\n" + "\n\n".join(sections) + "\n\nWritten by `python -m tools.write_errors`.\n"


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(page())
