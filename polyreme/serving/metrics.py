"""Metrics of a server for Prometheus; names are vLLM's, under polyreme:."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from polyreme.errors import ConfigError

try:
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ImportError:
    raise ConfigError(
        "polyreme serve and polyreme dash need prometheus-client, of the extra serve: pip install 'polyreme[serve]'"
    ) from None

CONTENT_TYPE = CONTENT_TYPE_LATEST
_PREFIX = "polyreme:"
_LATENCIES = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
"""Seconds, from a token of a small model to a long answer."""


class ServerMetrics:
    """Counts and times of one served model."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self._statistics: Any = None
        # read when it is asked for, as the engine counts by itself
        self._registry.register(self)  # type: ignore[arg-type]
        self._first = self._histogram("time_to_first_token_seconds", "From the request to its first token.")
        self._between = self._histogram("inter_token_latency_seconds", "Between two tokens of a text.")
        self._whole = self._histogram("e2e_request_latency_seconds", "From the request to its end.")
        self._ended = self._counter("request_success", "Texts that ended, by how.", "finished_reason")
        self._failed = self._counter("corrupted_requests", "Texts that ended on logits that are not finite.")
        self._rejected = self._counter("admission_rejections", "Requests refused because too many are under way.")
        for reason in ("stop", "length", "abort"):
            self._ended.labels(self._model, reason)

    def note(self, statistics: Any) -> None:
        """Take in an engine's statistics."""
        self._statistics = statistics

    def text(self) -> bytes:
        """The metrics as text, of the content type CONTENT_TYPE."""
        return generate_latest(self._registry)

    def clock(self) -> TextClock:
        """Times one text from now on."""
        return TextClock(self)

    def reject(self) -> None:
        """Count a request that was refused."""
        self._rejected.labels(self._model).inc()

    def collect(self) -> Iterable[Any]:
        """The engine's counts; prometheus-client calls this."""
        statistics = self._statistics
        if statistics is None:
            return
        usage = statistics.num_blocks_used / max(1, statistics.num_blocks)
        for name, about, value in (
            ("num_requests_running", "Texts that are being written.", statistics.num_running),
            ("num_requests_waiting", "Texts that wait for a place.", statistics.num_waiting),
            ("kv_cache_usage_perc", "Blocks of the cache in use, of 1.", usage),
        ):
            gauge = GaugeMetricFamily(_PREFIX + name, about, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, about, value in (
            ("prefix_cache_queries", "Tokens of prompts looked for in the cache.", statistics.prefix_tokens_queried),
            ("prefix_cache_hits", "Tokens of prompts that were in the cache.", statistics.prefix_tokens_hit),
            ("prompt_tokens", "Tokens of prompts.", statistics.prompt_tokens),
            ("generation_tokens", "Tokens written.", statistics.generated_tokens),
            ("spec_decode_num_draft_tokens", "Tokens drafted.", statistics.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that were right.", statistics.accepted_tokens),
            ("num_preemptions", "Texts that gave their blocks back for others.", statistics.num_preemptions),
        ):
            counter = CounterMetricFamily(_PREFIX + name, about, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(_PREFIX + name, about, ["model_name"], buckets=_LATENCIES, registry=self._registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, about, ["model_name", *labels], registry=self._registry)


class TextClock:
    """Times of one text."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics, self._model = metrics, metrics._model
        self._began = time.perf_counter()
        self._last: float | None = None

    def token(self, count: int = 1) -> None:
        """Tokens have come, together."""
        now = time.perf_counter()
        if self._last is None:
            self._metrics._first.labels(self._model).observe(now - self._began)
        else:
            for _ in range(count):
                self._metrics._between.labels(self._model).observe((now - self._last) / count)
        self._last = now

    def end(self, reason: str) -> None:
        """The text has ended."""
        if reason == "error":
            self._metrics._failed.labels(self._model).inc()
            return
        self._metrics._ended.labels(self._model, reason).inc()
        if reason != "abort":
            self._metrics._whole.labels(self._model).observe(time.perf_counter() - self._began)
