"""The chat page: what it is made of, and what a person sees and does, in a headless Chromium where there is one."""

import re
from importlib.resources import files

import pytest

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

from tests.serving.chromium import PROGRAM, Browser  # noqa: E402
from tests.serving.scripted import ServedThread, scripted_model, wait_until  # noqa: E402

PAGE = {"": "text/html", "page/chat.js": "text/javascript", "page/chat.css": "text/css", "page/icon.svg": "image/svg"}


def test_the_page_is_of_this_server_alone():
    with ServedThread(scripted_model()) as served:
        for path, kind in PAGE.items():
            answer = httpx.get(f"{served.url}/{path}")
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind)
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            addresses = set(re.findall(r"\w+://[^\s\"']+", answer.text)) - {"http://www.w3.org/2000/svg"}
            assert not addresses
            assert "innerHTML" not in answer.text
        assert httpx.get(f"{served.url}/page/chat.py").status_code == 404
        assert httpx.get(f"{served.url}/page/..%2fapp.py").status_code == 404
    assert {file.name for file in files("polyreme.serving").joinpath("page").iterdir()} == {
        "index.html",
        *(path.removeprefix("page/") for path in PAGE if path),
    }


needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no chromium on this machine: apt-get install chromium")
TEXT = "document.querySelectorAll('.assistant .body')[{}]?.textContent"


@pytest.mark.slow
@pytest.mark.process
@needs_chromium
def test_a_person_talks_to_the_model():
    with ServedThread(scripted_model(seconds=0.02, max_model_len=400)) as served, Browser() as browser:
        engine = served.model.engine
        browser.open(served.url)
        browser.wait("document.getElementById('state')?.textContent === 'ready'")
        assert browser.run("document.title") == "nano"
        browser.run("document.getElementById('max_tokens').value = 60")
        # markup of a message is text; Markdown of an answer becomes nodes
        browser.write("<b>né</b> **北京** `or`\n- to")
        browser.wait(f"{TEXT.format(0)}?.includes('<b>né</b> 北京')")
        browser.wait("document.querySelectorAll('.note').length === 1")
        assert browser.run("document.querySelectorAll('.assistant b').length") == 0
        assert browser.run("document.querySelector('.assistant strong').textContent") == "北京"
        assert browser.run("document.querySelector('.assistant code').textContent") == "or"
        assert "60 tokens" in browser.run("document.querySelector('.note').textContent")
        # the conversation goes on, and is stopped
        browser.run("document.getElementById('max_tokens').value = ''")
        browser.write("that is")
        browser.wait(f"{TEXT.format(1)}?.length > 20")
        assert browser.run("document.getElementById('send').textContent") == "Stop"
        browser.run("document.getElementById('send').click()")
        browser.wait("document.querySelectorAll('.note').length === 2")
        assert wait_until(lambda: not engine.live)
        assert engine.aborted
        # the whole conversation was sent: the engine repeats it
        assert "<user>" in browser.run(TEXT.format(1))
        # what the server refuses is told
        browser.run("document.getElementById('temperature').value = 500")
        browser.write("to")
        browser.wait(f"{TEXT.format(2)}?.includes('temperature: Input should be less than or equal to 100')")
        browser.wait("document.querySelector('.failed') !== null")
        browser.run("document.getElementById('temperature').value = 1")
        browser.run("[...document.querySelectorAll('.note button')].pop().click()")
        browser.wait(f"{TEXT.format(2)}?.includes('to')")
        browser.run("document.getElementById('new').click()")
        assert browser.run("document.querySelectorAll('.message').length") == 0
        assert all(url.startswith(served.url) for url in browser.urls)
        # Chromium notes the refused request itself
        assert all("400" in str(problem) for problem in browser.problems), browser.problems


@pytest.mark.slow
@pytest.mark.process
@needs_chromium
def test_a_model_without_a_template_goes_on_from_a_text(tmp_path):
    model = scripted_model(max_model_len=100, template=None)
    with ServedThread(model) as served, Browser(width=420, height=700) as browser:
        browser.open(served.url)
        browser.wait("document.getElementById('input')?.placeholder === 'Begin a text'")
        browser.write("to be or not")
        browser.wait("document.querySelectorAll('.note').length === 1")
        text = browser.run(TEXT.format(0))
        assert text.startswith("to be or notto be")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        browser.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 5000
