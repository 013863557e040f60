"""Runs the Python of one page as one program and writes what each block printed and drew: run_page.py PAGE RESULT.

Blocks keep the lines that they have on the page, so that tracebacks and captured code name these.
"""

import contextlib
import doctest
import io
import json
import re
import sys
import traceback
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RAISES = re.compile(r"\s+raises\s+```text\n(.*?)```", re.DOTALL)
"""What stands behind a block that is there to show an error."""
PICTURES = ("*.png", "*.svg")
ROOT = Path(__file__).parents[2]
SHARED = ("configs", "data", "examples", "tests", "docs", "benchmarks")


def share(place):
    """Folders of the checkout that pages name, in the folder that a page is run in."""
    for name in SHARED:
        Path(place, name).symlink_to(ROOT / name)


def blocks(text):
    """(line of the first statement, code, message of the error that it shows) of every block of Python on a page."""
    found = ((m, RAISES.match(text, m.end())) for m in BLOCK.finditer(text))
    return [(text.count("\n", 0, m.start(1)), m[1], shown[1] if shown else "") for m, shown in found]


def pictures():
    """Pictures in this folder by name, with the time they were written."""
    return {path.name: path.stat().st_mtime_ns for kind in PICTURES for path in Path().glob(kind)}


def run_doctest(code, names, start):
    """A block of prompts and answers, which must be the answers; raises AssertionError with the first that is not."""
    test = doctest.DocTestParser().get_doctest(code, names, "page", "page", start)
    report = io.StringIO()
    failed, _ = doctest.DocTestRunner(verbose=False).run(test, out=report.write, clear_globs=False)
    names.update(test.globs)
    assert not failed, report.getvalue()


def run(page, names):
    """One record a block: what it printed, names of the pictures it wrote, and the traceback it ended in, if any."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for start, code, _ in blocks(text):
        lines[start : start + code.count("\n")] = code.split("\n")[:-1]
    script = Path("page.py").resolve()  # where captured code looks for its source
    script.write_text("\n".join(lines), encoding="utf-8")
    records = []
    for start, code, message in blocks(text):
        before, printed, error = pictures(), io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(printed):
                if code.startswith(">>>"):
                    run_doctest(code, names, start)
                else:
                    exec(compile("\n" * start + code, str(script), "exec"), names)
            if message:
                error = f"raised nothing, and should raise: {message}"
        except Exception as raised:  # noqa: BLE001  the page's code: whatever it raises is told
            if not message or " ".join(message.split()) not in " ".join(str(raised).split()):
                error = traceback.format_exc(limit=-3)
        drawn = sorted(name for name, time in pictures().items() if before.get(name) != time)
        records.append({"printed": printed.getvalue(), "pictures": drawn, "error": error})
        if error:
            break
    return records


if __name__ == "__main__":
    page, result = map(Path, sys.argv[1:])
    sys.path.insert(0, "")
    main = sys.modules["__main__"].__dict__
    main["__file__"] = str(Path("examples", "page.py").absolute())  # pages show scripts that stand there
    result.write_text(json.dumps(run(page, main)))
