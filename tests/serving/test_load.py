"""`polyreme bench serve`: arrivals, times of a server whose times are known, and failures."""

import json
import math

import numpy as np
import pytest

pytest.importorskip("starlette")

from polyreme.cli.main import main
from polyreme.errors import ConfigError, DataError
from polyreme.serving.guard import Access
from polyreme.serving.load import LoadOptions, LoadReport, RequestTimes, load
from polyreme.serving.server import listen
from polyreme.serving.service import ServiceLimits
from tests.serving.scripted import ServedThread, scripted_model


def test_arrivals_are_a_poisson_process():
    times = np.array(LoadOptions("http://x", num_requests=4000, rate=5.0).arrivals())
    gaps = np.diff(times)
    # of exponential gaps the mean has this deviation, and so has the deviation, twice over
    assert abs(gaps.mean() - 0.2) < 5 * 0.2 / math.sqrt(4000)
    assert abs(gaps.std() - 0.2) < 10 * 0.2 / math.sqrt(4000)
    assert LoadOptions("http://x", rate=math.inf).arrivals() == [0.0] * 100
    assert LoadOptions("http://x", seed=1).arrivals() != LoadOptions("http://x", seed=2).arrivals()


def test_times_are_those_of_the_requests():
    times = [RequestTimes(sent=i, texts=[i + 0.1, i + 0.3, i + 0.4], ended=i + 0.5, output_tokens=4) for i in range(10)]
    report = LoadReport.of([*times, RequestTimes(sent=10, ended=11, error="HTTP 429")])
    means = {name: values["mean"] for name, values in report.milliseconds.items()}
    assert means == pytest.approx({"ttft": 100, "tpot": 100, "itl": 150, "e2e": 500})
    assert report.milliseconds["itl"]["p99"] == pytest.approx(200)
    assert (report.num_requests, report.num_failed, report.errors) == (11, 1, {"HTTP 429": 1})
    assert report.seconds == 11
    assert report.output_tokens_per_second == pytest.approx(40 / 11)


def test_a_server_is_measured(capsys, tmp_path):
    file = tmp_path / "key"
    file.write_text("secret\n")
    model = scripted_model(seconds=0.01, max_model_len=400)
    with ServedThread(model, ServiceLimits(), access=Access.of("127.0.0.1", file)) as served:
        words = ["bench", "serve", f"{served.url}/v1/", "--num-requests=12", "--request-rate=50", "--input-words=8"]
        words += ["--output-tokens=10"]
        assert main([*words, f"--api-key-file={file}", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert main([*words, f"--api-key-file={file}"]) == 0
        assert "requests/s" in capsys.readouterr().out
        assert main(words) == 3
        assert "HTTP 401: invalid_api_key" in capsys.readouterr().err
    assert (report["num_requests"], report["num_failed"], report["output_tokens"]) == (12, 0, 120)
    # a step takes 10 ms, and eight of the requests are in it
    assert report["milliseconds"]["tpot"]["p50"] >= 10
    assert report["milliseconds"]["e2e"]["p50"] >= 100
    assert report["milliseconds"]["ttft"]["p99"] <= report["milliseconds"]["e2e"]["p99"]


def test_what_fails_is_counted_by_why(capsys):
    limits = ServiceLimits(max_num_seqs=1, max_waiting=1)
    with ServedThread(scripted_model(seconds=0.01, max_model_len=400), limits) as served:
        report = load(LoadOptions(served.url, num_requests=4, rate=math.inf, input_words=4, output_tokens=5))
        assert (report.num_failed, sum(report.errors.values())) == (2, 2)
        assert "HTTP 429" in next(iter(report.errors))
        words = ["bench", "serve", served.url, "--num-requests=4", "--request-rate=inf", "--input-words=300"]
        assert main(words) == 1
        assert "failed      4: HTTP 400: context_length_exceeded" in capsys.readouterr().out


def test_an_address_without_a_server_is_told():
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    with pytest.raises(DataError, match="is a server there"):
        load(LoadOptions(f"http://127.0.0.1:{port}"))
    with pytest.raises(ConfigError, match="not an address"):
        LoadOptions("127.0.0.1:8000")
    with pytest.raises(ConfigError, match="Port out of range"):
        LoadOptions("http://127.0.0.1:99999")
    with pytest.raises(ConfigError, match="rate=0 is out of range"):
        LoadOptions("http://x", rate=0)


@pytest.mark.parametrize("data", [b"", b"\xff"])
def test_a_file_without_a_key_is_refused(tmp_path, capsys, data):
    (tmp_path / "key").write_bytes(data)
    assert main(["bench", "serve", "http://x", f"--api-key-file={tmp_path / 'key'}"]) == 2
    assert "--api-key-file" in capsys.readouterr().err
