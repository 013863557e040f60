"""What Prometheus reads of a server."""

import pytest

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")
parser = pytest.importorskip("prometheus_client.parser")

from polyreme.serving.service import ServiceLimits  # noqa: E402
from tests.serving.scripted import ServedThread, scripted_model, wait_until  # noqa: E402


def metrics_of(served):
    """{name and labels other than the model's: value}."""
    answer = httpx.get(f"{served.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    listed = [s for family in parser.text_string_to_metric_families(answer.text) for s in family.samples]
    assert all(sample.labels.pop("model_name") == "nano" for sample in listed)
    return {(sample.name, *sample.labels.values()): sample.value for sample in listed}


def test_what_is_counted_and_timed():
    limits = ServiceLimits(max_num_seqs=3, max_waiting=1)
    with ServedThread(scripted_model(), limits) as served:

        def ask(**body):
            return httpx.post(f"{served.url}/v1/completions", json={"prompt": "to be"} | body).status_code

        assert metrics_of(served)["polyreme:request_success_total", "stop"] == 0
        assert ask(n=2, max_tokens=5) == 200
        assert ask(stop="be") == 200
        assert ask(n=5) == 400
        assert ask(prompt="poison") == 500
        samples = metrics_of(served)
    assert samples["polyreme:num_requests_running",] == samples["polyreme:num_requests_waiting",] == 0
    assert samples["polyreme:kv_cache_usage_perc",] == 0.25
    assert samples["polyreme:prefix_cache_hits_total",] / samples["polyreme:prefix_cache_queries_total",] == 0.75
    assert samples["polyreme:prompt_tokens_total",] == 50
    assert samples["polyreme:generation_tokens_total",] == 60
    assert samples["polyreme:num_preemptions_total",] == 2
    assert samples["polyreme:spec_decode_num_draft_tokens_total",] == 9
    assert samples["polyreme:spec_decode_num_accepted_tokens_total",] == 7
    assert samples["polyreme:request_success_total", "length"] == 2
    assert samples["polyreme:request_success_total", "stop"] == 1
    assert samples["polyreme:corrupted_requests_total",] == 1
    assert samples["polyreme:time_to_first_token_seconds_count",] == 3
    assert samples["polyreme:e2e_request_latency_seconds_count",] == 3
    # two texts of five tokens, and what came before the stop string
    assert samples["polyreme:inter_token_latency_seconds_count",] >= 8


def test_what_was_given_up_and_refused_is_counted():
    limits = ServiceLimits(max_num_seqs=1, max_waiting=1)
    with ServedThread(scripted_model(seconds=0.02, max_model_len=4000), limits) as served:
        body = {"prompt": "to be", "max_tokens": 3000, "n": 2, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()  # whose end closes the connection
            next(lines)
            assert httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"}).status_code == 429
        assert wait_until(lambda: not served.service.num_texts)
        # no step follows that would tell
        assert wait_until(lambda: metrics_of(served)["polyreme:num_requests_running",] == 0)
        samples = metrics_of(served)
    assert samples["polyreme:admission_rejections_total",] == 1
    assert samples["polyreme:request_success_total", "abort"] == 2
