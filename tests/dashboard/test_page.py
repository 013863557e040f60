"""The dashboard's page in a headless Chromium: charts, a run that goes on, hostile names; light, dark and narrow."""

import json
import re
import subprocess
import sys

import pytest

from tests.serving.chromium import PROGRAM, Browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(PROGRAM is None, reason="no chromium on this machine: apt-get install chromium"),
]
HOSTILE = "<img src=x onerror='document.title=1'>"
PATHS = "document.querySelectorAll('svg.chart path').length"


def log(folder, steps):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            record = {"kind": "train", "step": step, "loss": 9 / step, "grad_norm": 1.0, "memory_bytes": 1 << 30}
            file.write(json.dumps(record) + "\n")
            if step % 10 == 0:
                file.write(json.dumps({"kind": "validation", "step": step, "loss": 10 / step}) + "\n")


@pytest.fixture
def served(tmp_path):
    top = tmp_path / "runs"
    log(top / "plain", range(1, 31))
    log(top / HOSTILE, range(1, 21))
    sample = {"kind": "sample", "step": 20, "text": f"{HOSTILE}\nIn the beginning"}
    with (top / HOSTILE / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(sample) + "\n" + json.dumps({"kind": "spike", "step": 9, "loss": 90.0}) + "\n")
    (top / "plain" / "plan.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>")
    command = [sys.executable, "-m", "polyreme", "dash", str(top), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = process.stdout.readline()
        yield top, re.search(r"2 runs on (http://127\.0\.0\.1:\d+)", said)[1]
        process.terminate()
        assert process.stdout.read() == "stopped\n"
    assert process.returncode == 0


def test_runs_are_compared_and_followed(served, tmp_path):
    top, url = served
    with Browser() as browser:
        browser.open(url)
        # loss of training and validation, gradient norm, memory, of both runs
        browser.wait(f"{PATHS} === 8")
        assert browser.run("document.title") == "polyreme runs"
        assert browser.run("[...document.querySelectorAll('figcaption')].map((f) => f.firstChild.data)") == [
            "Loss",
            "Memory, GiB",
            "Gradient norm",
        ]
        names = browser.run("[...document.querySelectorAll('#runs button')].map((b) => b.firstChild.data)")
        assert names == [HOSTILE, "plain"]
        # a run goes on, and another appears
        log(top / "plain", range(31, 41))
        log(top / "late", [1, 2])
        browser.wait("document.getElementById('runs').textContent.includes('step 40')")
        browser.wait(f"{PATHS} === 11")
        # one run: samples, faults, pictures, as text
        browser.run("document.querySelectorAll('#runs button')[0].click()")
        browser.wait("document.querySelector('#details pre')?.textContent.includes('In the beginning')")
        assert "spike" in browser.run("document.querySelector('#details table').textContent")
        buttons = "[...document.querySelectorAll('#runs button')]"
        browser.run(f"{buttons}.find((button) => button.textContent.startsWith('plain')).click()")
        browser.wait("document.querySelector('#details h2')?.textContent === 'plain'")
        browser.wait("document.querySelector('#details img')?.naturalWidth > 0")
        assert browser.run("document.querySelectorAll('#runs img, #details pre img').length") == 0
        # the pointer tells values; runs can be left out; curves smoothed
        browser.run("scrollTo(0, 0)")
        place = json.loads(browser.run("JSON.stringify(document.querySelector('svg.chart').getBoundingClientRect())"))
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place["x"] + 60, y=place["y"] + 50)
        browser.wait("document.querySelector('.values').textContent.includes(' at ')")
        assert browser.run("document.querySelector('.cursor').getAttribute('visibility')") == "visible"
        browser.run("document.querySelector('#runs input').click()")
        browser.wait(f"{PATHS} === 7")
        browser.run("smoothing.value = 0.9; smoothing.dispatchEvent(new Event('input'))")
        assert browser.run("document.querySelectorAll('path.faint').length") == 6
        assert browser.run("document.title") == "polyreme runs"
        assert all(address.startswith(url) for address in browser.urls)
        assert not browser.problems
    for name, width, dark in (("wide", 1200, False), ("narrow", 420, True)):
        with Browser(width=width, height=900, dark=dark) as browser:
            browser.open(url)
            browser.wait(f"{PATHS} === 11")
            assert browser.run("document.documentElement.scrollWidth <= innerWidth")
            colour = browser.run("getComputedStyle(document.body).backgroundColor")
            assert colour == ("rgb(20, 24, 24)" if dark else "rgb(247, 247, 245)")
            browser.screenshot(tmp_path / f"{name}.png")
            assert (tmp_path / f"{name}.png").stat().st_size > 10_000
