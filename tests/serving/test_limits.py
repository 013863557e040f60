"""Who may ask, from where, how much and how slowly; ending while requests are under way."""

import asyncio
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

from polyreme.errors import ConfigError  # noqa: E402
from polyreme.serving import engine_thread  # noqa: E402
from polyreme.serving.guard import Access, read_keys  # noqa: E402
from polyreme.serving.server import ServerOptions, listen, names_of, serve  # noqa: E402
from polyreme.serving.service import ServiceLimits  # noqa: E402
from tests.serving.scripted import ServedThread, scripted_model  # noqa: E402

LIMITS = ServiceLimits(body_bytes=2000, header_bytes=4000, header_seconds=0.3, body_seconds=0.3)
KEY = "k" * 32


@pytest.fixture(scope="module")
def served():
    with ServedThread(scripted_model(), LIMITS) as served:
        yield served


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{'x' * 32}\n\n{KEY}\n")
    access = Access.of("127.0.0.1", file, ["https://example.org"])
    with ServedThread(scripted_model(), access=access) as served:
        yield served


def talk(served, *parts, pause=0.0):
    """What comes of bytes on a connection, sent with pauses, until the server closes it."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection:
        received = b""
        try:
            for part in parts:
                connection.sendall(part)
                if select.select([connection], [], [], pause)[0] and pause:
                    break
            while data := connection.recv(65536):
                received += data
        except ConnectionError:
            pass
        return received


def status_and_error(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
HOSTILE = [
    ([HEAD + b"Content-Length: 20000000\r\n\r\n"], 413, "over 2000 bytes"),
    ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"400\r\n" + b" " * 1024 + b"\r\n"] * 3], 413, "over 2000 bytes"),
    ([b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 200_000 + b"\r\n\r\n"], 431, "too long"),
    ([b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 33_000 + b"\r\n\r\n"], 431, "too long"),
    ([b"GET /health HTTP/1.1\r\nHost: loc"], 408, "no request"),
    ([b""], 408, "no request"),
    ([HEAD + b"Content-Length: 20\r\n\r\n{"], 408, "the body was not there"),
    ([b"nonsense\r\n\r\n"], 400, "not a request of HTTP"),
    ([HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n"], 400, "not a request of HTTP"),
    ([b"GET /health HTTP/1.1\r\nHost: evil.example:80\r\n\r\n"], 403, "not a name of this server"),
    ([b"GET /health HTTP/1.0\r\n\r\n"], 403, "not a name of this server"),
    ([HEAD + b"Origin: http://evil.example\r\nContent-Length: 2\r\n\r\n{}"], 403, "--allow-origin"),
    ([HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"], 415, "'gzip'"),
    ([HEAD + b"Origin: null\r\nContent-Length: 2\r\n\r\n{}"], 403, "--allow-origin"),
]


@pytest.mark.parametrize(("parts", "status", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_connection_is_answered_and_closed(served, parts, status, message):
    code, error = status_and_error(talk(served, *parts))
    assert (code, error["type"]) == (status, "permission_error" if status == 403 else "invalid_request_error")
    assert message in error["message"]
    assert httpx.get(f"{served.url}/health").status_code == 200


@pytest.fixture(scope="module")
def patient():
    with ServedThread(scripted_model(), ServiceLimits(body_bytes=1_000_000, body_seconds=5)) as served:
        yield served


@pytest.mark.parametrize("head", [b"", b"Origin: http://evil.example\r\n"], ids=["too long", "not allowed"])
def test_who_sends_a_long_body_whole_still_sees_why_it_is_refused(patient, head):
    # far more than sockets hold: a connection that is closed while it comes is reset, and the answer with it
    body = b" " * 12_000_000
    answer = talk(patient, HEAD + head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    status, error = status_and_error(answer)
    assert (status, error["code"]) == ((403, "origin") if head else (413, "body_too_long"))


def test_a_body_without_end_is_not_heard_out(patient):
    # sixteen times the longest, and what sockets hold
    began = time.monotonic()
    talk(patient, HEAD + b"Content-Length: 100000000\r\n\r\n", *[b" " * 100_000] * 1000)
    assert time.monotonic() - began < 5


def test_a_head_that_comes_byte_by_byte_has_no_more_time(served):
    began = time.monotonic()
    answer = talk(served, *[bytes([b]) for b in b"GET /health HTTP/1.1\r\n"], pause=0.03)
    assert answer.startswith(b"HTTP/1.1 408")
    # its time and the pauses after it
    assert time.monotonic() - began < 2


def test_half_a_head_after_an_answer_has_no_more_time(served):
    address = ("127.0.0.1", served.port)
    with socket.create_connection(address, timeout=5) as connection, connection.makefile("rb") as answers:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answers.readline().startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /hea")
        assert b"HTTP/1.1 408" in answers.read()


def test_the_servers_own_page_may_ask(served):
    answer = httpx.get(f"{served.url}/v1/models", headers={"Origin": served.url})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


def test_every_route_needs_a_key(guarded):
    routes = [(route.path, method) for route in guarded.endpoints.app().routes for method in sorted(route.methods)]
    assert len(routes) > 8
    wrong = ("", f"Bearer {KEY}x", "Basic !", KEY)
    places = [*routes, ("/nothing", "GET"), ("/v1/models", "OPTIONS")]
    with httpx.Client(base_url=guarded.url) as client:
        for (path, method), key in itertools.product(places, wrong):
            answer = client.request(method, path, headers={"Authorization": key} if key else {})
            if path == "/health":
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, path
            scheme = "Basic" if path == "/" or path.startswith("/page/") else "Bearer"
            assert answer.headers["www-authenticate"].split()[0] == scheme
            if method != "HEAD":
                assert answer.json()["error"]["code"] == "invalid_api_key"


def test_a_key_opens_as_a_bearers_or_as_a_browsers_password(guarded):
    url = f"{guarded.url}/v1/models"
    assert httpx.get(url, headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    assert httpx.get(url, auth=("anyone", KEY)).status_code == 200
    # whoever has a key may call it by any name
    assert httpx.get(url, auth=("", KEY), headers={"Host": "example.org"}).status_code == 200


def test_pages_of_an_allowed_origin_may_ask(guarded):
    url, origin = f"{guarded.url}/v1/models", "https://example.org"
    preflight = httpx.options(url, headers={"Origin": origin, "Access-Control-Request-Method": "POST"})
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == origin
    assert "Authorization" in preflight.headers["access-control-allow-headers"]
    answer = httpx.get(url, auth=("", KEY), headers={"Origin": origin})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
    assert httpx.get(url, auth=("", KEY), headers={"Origin": "https://example.com"}).status_code == 403


def test_others_reach_a_server_with_a_key_alone(tmp_path):
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        with pytest.raises(ConfigError, match="reached from other machines; give --api-key-file, or --insecure"):
            Access.of(host)
        assert Access.of(host, is_insecure=True).hosts is None
    assert Access.of("127.0.0.2").hosts[-1] == "127.0.0.2"
    assert Access.of("::1").keys == ()
    (tmp_path / "keys").write_text("a\n")
    assert len(Access.of("0.0.0.0", tmp_path / "keys").keys) == 1
    with pytest.raises(ConfigError, match="give a scheme and a host"):
        Access.of("localhost", None, ["*"])


@pytest.mark.parametrize("data", [b"", b"\n \n", b"a b\n", b"\xff\n", None])
def test_a_file_without_keys_is_refused(tmp_path, data):
    if data is not None:
        (tmp_path / "keys").write_bytes(data)
    with pytest.raises(ConfigError, match="--api-key-file"):
        read_keys(tmp_path / "keys")


def test_an_address_that_cannot_be_had_is_told():
    with listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:"):
        listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match="give another --host or --port"):
        listen("no.such.host.invalid", 0)


def test_small_answers_do_not_wait_for_acknowledgements(served):
    """Where the kernel keeps the second of two small writes back, an answer takes 40 ms."""
    with httpx.Client() as client:
        seconds = []
        for _ in range(20):
            began = time.monotonic()
            client.get(f"{served.url}/health")
            seconds.append(time.monotonic() - began)
    assert min(seconds) < 0.02


@pytest.mark.parametrize("name", ["max_num_seqs", "body_bytes", "header_seconds"])
def test_limits_out_of_range_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=-1 is out of range"):
        ServiceLimits(**{name: -1})


def test_a_model_is_named_as_asked_or_by_its_path():
    assert names_of("runs/gpt/", []) == ("gpt",)
    assert names_of("runs/gpt", ["a", "b"]) == ("a", "b")


def test_health_answers_while_much_is_asked():
    limits = ServiceLimits(max_num_seqs=2)
    body = {"prompt": "to be", "max_tokens": 10}
    model = scripted_model(seconds=0.005, max_model_len=400)
    with ServedThread(model, limits) as busy, httpx.Client(base_url=busy.url, timeout=60) as client:
        client.get("/health")
        codes = []

        def ask():
            codes.append(client.post("/v1/completions", json=body).status_code)

        threads = [threading.Thread(target=ask) for _ in range(40)]
        for thread in threads:
            thread.start()
        seconds = []
        while any(thread.is_alive() for thread in threads):
            began = time.monotonic()
            assert client.get("/health").status_code == 200
            seconds.append(time.monotonic() - began)
        assert min(seconds) < 1
        for thread in threads:
            thread.join()
        assert codes == [200] * 40


PROGRAM = """
import atexit

from polyreme.serving.server import ServerOptions, leave, serve
from tests.serving.scripted import scripted_model

def load():
    return scripted_model(seconds=0.05, max_model_len=4000)

def say(text):
    print(text, flush=True)

serve(ServerOptions(("nano",), port=0, drain_seconds=5), load, say)
atexit.register(print, "left")
leave()
"""


def start():
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
        env=environment,
    )


def test_sigterm_lets_requests_end_and_exits_0():
    with start() as process:
        url = re.search(r"http://\S+", process.stdout.readline())[0].rstrip(",")
        assert process.stdout.readline() == f"serving nano on {url}\n"
        body = {"prompt": "to be", "max_tokens": 12, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health")
            assert list(lines)[-2] == "data: [DONE]"
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (0, "stopped\nleft\n", "")


def test_the_end_waits_for_no_chore(monkeypatch):
    monkeypatch.setattr(engine_thread, "_IDLE_SECONDS", 0.01)
    begins, may_end, is_late = threading.Event(), threading.Event(), []

    async def run():
        chores = [lambda: begins.set() or may_end.wait(60), lambda: is_late.append(True)]
        engine = SimpleNamespace(has_unfinished=False)
        thread = engine_thread.EngineThread(engine, asyncio.get_running_loop(), lambda counts: None, chores)
        begins.wait(60)
        thread.close()
        assert not may_end.is_set()
        may_end.set()
        await asyncio.to_thread(thread._thread.join)

    asyncio.run(run())
    assert not is_late


def test_what_loading_raises_ends_the_server():
    def load():
        raise ConfigError("no such model")

    said = []
    with pytest.raises(ConfigError, match="no such model"):
        serve(ServerOptions(("nano",), port=0), load, said.append)
    assert [text.split()[0] for text in said] == ["listening"]
