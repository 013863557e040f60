"""Runs every block of Python of the pages and shows under it what it printed, and the pictures that it wrote.

A page is one program, run in a process and a folder of its own, with eight virtual devices, in which configs, data,
examples and tests are those of the checkout. Results are kept in build/docs until the page or the package changes.
A block that fails is a warning, and with -W the end of the build.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from run_page import BLOCK, ROOT, share
from sphinx.util import logging

KEPT = ROOT / "build" / "docs"
LONGEST = 600  # seconds of one page
SHOWN = 40  # lines of what a block printed
logger = logging.getLogger(__name__)


def _digest_of_package():
    digest = hashlib.sha256(Path(__file__).with_name("run_page.py").read_bytes())
    for path in sorted((ROOT / "polyreme").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run_page(path, digest):
    """Records of the blocks of a page, from an earlier build if nothing changed."""
    text = path.read_text(encoding="utf-8")
    key = hashlib.sha256((digest + "".join(BLOCK.findall(text))).encode()).hexdigest()[:24]
    folder = KEPT / "snippets" / key
    result = folder / "records.json"
    if result.exists():
        return folder, json.loads(result.read_text())
    with tempfile.TemporaryDirectory() as place:
        share(place)
        environment = {
            **os.environ,
            "CPU_NUM": "8",
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "MPLBACKEND": "agg",
            "POLYREME_COMPILE_CACHE": os.environ.get("POLYREME_COMPILE_CACHE", str(KEPT / "programs")),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        records = Path(place, "records.json")
        command = [sys.executable, str(Path(__file__).with_name("run_page.py")), str(path), str(records)]
        try:
            done = subprocess.run(
                command, cwd=place, env=environment, stderr=subprocess.PIPE, text=True, timeout=LONGEST
            )
            complaint = done.stderr
        except subprocess.TimeoutExpired:
            complaint = f"took over {LONGEST} s"
        if not records.exists():
            return folder, [{"printed": "", "pictures": [], "error": complaint[-2000:]}]
        rows = json.loads(records.read_text())
        if not any(row["error"] for row in rows):
            folder.mkdir(parents=True, exist_ok=True)
            for row in rows:
                for name in row["pictures"]:
                    shutil.copy(Path(place, name), folder)
            shutil.copy(records, result)
        return folder, rows


def _run_all(app):
    app.snippets = {}
    docs = Path(app.srcdir)
    pages = {
        str(path.relative_to(docs).with_suffix("")): path
        for path in sorted(docs.rglob("*.md"))
        if not path.is_relative_to(docs / "api") and BLOCK.search(path.read_text(encoding="utf-8"))
    }
    if os.environ.get("POLYREME_DOCS_SNIPPETS") == "off":
        return
    digest = _digest_of_package()
    # a page computes on all cores while it computes, and on one while it compiles
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        results = pool.map(lambda item: (item[0], run_page(item[1], digest)), pages.items())
        for count, (name, (folder, rows)) in enumerate(results, 1):
            logger.info(f"snippets: {name} ({count} of {len(pages)})")
            for row in rows:
                if row["error"]:
                    logger.warning(f"a snippet of {name} failed:\n{row['error']}")
            app.snippets[name] = folder, rows


def _shown(page, folder, row, docs):
    lines = row["printed"].rstrip().splitlines()
    if len(lines) > SHOWN:
        lines = [*lines[: SHOWN - 10], f"... {len(lines) - SHOWN} lines", *lines[-10:]]
    parts = []
    if lines:
        fence = "`" * 5
        parts.append("\n".join([f"{fence}text", *lines, fence]))
    for name in row["pictures"]:
        there = docs / "_pictures" / page.replace("/", "-")
        there.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name, there)
        parts.append(f"![{name}](/_pictures/{there.name}/{name})")
    inside = "\n\n".join(parts)
    return f"\n\n````````{{container}} snippet-output\n{inside}\n````````\n" if parts else ""


def _show(app, page, source):
    folder, rows = app.snippets.get(page, (None, []))
    following = iter(rows)
    docs = Path(app.srcdir)

    def with_output(block):
        row = next(following, None)
        return block[0] + ("" if row is None or row["error"] else _shown(page, folder, row, docs))

    source[0] = BLOCK.sub(with_output, source[0])


def setup(app):
    app.connect("builder-inited", _run_all)
    app.connect("source-read", _show, priority=400)
    return {"parallel_read_safe": True}
