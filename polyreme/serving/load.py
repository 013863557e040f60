"""Load on a server: requests that arrive at random, whether earlier ones are done or not, and how long each waits."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

import numpy as np

from polyreme.errors import ConfigError, DataError

_WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he")


@dataclass(frozen=True)
class LoadOptions:
    """Settings of the load on a server.

    rate: requests a second on average, by a Poisson process of this seed; inf for all at once. input_words: of each
    prompt, drawn among common ones. output_tokens: of each text, which does not end before where ignore_eos. model:
    its name, the first that the server lists if None. key: of the server, if it needs one. seconds: that a request may
    take.
    """

    url: str
    num_requests: int = 100
    rate: float = 4.0
    input_words: int = 64
    output_tokens: int = 64
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    model: str | None = None
    key: str | None = None
    seconds: float = 600.0

    def __post_init__(self) -> None:
        try:
            address = urlsplit(self.url)
            host, _ = address.hostname, address.port  # ValueError for what is no port
        except ValueError as error:
            raise ConfigError(f"{self.url}: not an address ({error}); give one such as http://127.0.0.1:8000") from None
        if address.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{self.url}: not an address; give one such as http://127.0.0.1:8000")
        for name in ("num_requests", "rate", "input_words", "output_tokens", "seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"LoadOptions: {name}={getattr(self, name)!r} is out of range; give more than 0")

    def arrivals(self) -> list[float]:
        """Seconds from the beginning at which each request is sent."""
        draw = random.Random(self.seed)
        times, now = [], 0.0
        for _ in range(self.num_requests):
            times.append(now)
            now += 0.0 if self.rate == float("inf") else draw.expovariate(self.rate)
        return times

    def bodies(self) -> Iterator[dict[str, Any]]:
        """The request bodies."""
        draw = random.Random(self.seed + 1)
        for number in range(self.num_requests):
            body = {
                "model": self.model,
                "prompt": " ".join(draw.choices(_WORDS, k=self.input_words)),
                "max_tokens": self.output_tokens,
                "temperature": self.temperature,
                "seed": number,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            yield body | ({"ignore_eos": True} if self.ignore_eos else {})


@dataclass
class RequestTimes:
    """Times of one request: seconds from the beginning at which it was sent and at which text came; tokens, and the
    error if any."""

    sent: float
    texts: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class LoadReport:
    """The results of a load. Milliseconds: ttft, to the first text; tpot, each token after it; itl, between two
    texts that came; e2e, to the end; each as mean, p50, p95 and p99. seconds: from the first request to the last
    one's end."""

    num_requests: int
    num_failed: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    milliseconds: dict[str, dict[str, float]]

    @classmethod
    def of(cls, times: Sequence[RequestTimes]) -> LoadReport:
        """The report of requests."""
        good = [t for t in times if t.error is None and t.texts]
        seconds = max((t.ended for t in times), default=0.0) - min((t.sent for t in times), default=0.0)
        columns = {
            "ttft": [t.texts[0] - t.sent for t in good],
            "tpot": [(t.texts[-1] - t.texts[0]) / (t.output_tokens - 1) for t in good if t.output_tokens > 1],
            "itl": [gap for t in good for gap in np.diff(t.texts).tolist()],
            "e2e": [t.ended - t.sent for t in good],
        }
        tokens = sum(t.output_tokens for t in good)
        return cls(
            num_requests=len(times),
            num_failed=len(times) - len(good),
            errors=dict(Counter(t.error or "no text" for t in times if t not in good)),
            seconds=seconds,
            prompt_tokens=sum(t.prompt_tokens for t in good),
            output_tokens=tokens,
            requests_per_second=len(good) / seconds if seconds else 0.0,
            output_tokens_per_second=tokens / seconds if seconds else 0.0,
            milliseconds={name: _summary(column) for name, column in columns.items() if column},
        )

    def lines(self) -> Iterator[str]:
        """The report as lines for people."""
        yield f"requests      {self.num_requests - self.num_failed} of {self.num_requests} in {self.seconds:.2f} s"
        for error, count in self.errors.items():
            yield f"  failed      {count}: {error}"
        yield f"tokens        {self.prompt_tokens:,} of prompts, {self.output_tokens:,} written"
        yield f"rates         {self.requests_per_second:.2f} requests/s, {self.output_tokens_per_second:.1f} tokens/s"
        yield "ms                 mean      p50      p95      p99"
        for name, values in self.milliseconds.items():
            yield f"  {name:<12}" + "".join(f"{values[key]:9.1f}" for key in ("mean", "p50", "p95", "p99"))

    def as_json(self) -> str:
        """One object."""
        return json.dumps(asdict(self), indent=1)


def load(options: LoadOptions) -> LoadReport:
    """Send the requests -> what they showed. Raises DataError where the server is not reached."""
    return asyncio.run(_load(options))


async def _load(options: LoadOptions) -> LoadReport:
    if options.model is None:
        options = LoadOptions(**{**vars(options), "model": await _first_model(options)})
    began = time.perf_counter()
    pairs = zip(options.arrivals(), options.bodies(), strict=True)
    return LoadReport.of(await asyncio.gather(*(_send(options, began, wait, body) for wait, body in pairs)))


async def _first_model(options: LoadOptions) -> str:
    try:
        async with asyncio.timeout(min(options.seconds, 30.0)):
            lines = [line async for line in _exchange(options, "GET", "/v1/models", None)]
        return json.loads(b"".join(lines))["data"][0]["id"]
    except (OSError, TimeoutError, RuntimeError, ValueError, LookupError, EOFError) as error:
        raise DataError(f"{options.url}/v1/models: {error or type(error).__name__}; is a server there?") from None


async def _send(options: LoadOptions, began: float, wait: float, body: dict[str, Any]) -> RequestTimes:
    await asyncio.sleep(began + wait - time.perf_counter())
    times = RequestTimes(time.perf_counter() - began)
    try:
        async with asyncio.timeout(options.seconds):
            async for line in _exchange(options, "POST", "/v1/completions", body):
                if line.startswith(b"data: {"):
                    _note(times, json.loads(line[6:]), time.perf_counter() - began)
    except (OSError, TimeoutError, RuntimeError, ValueError, EOFError) as error:
        times.error = str(error) or type(error).__name__
    times.ended = time.perf_counter() - began
    return times


def _note(times: RequestTimes, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        raise RuntimeError(event["error"]["message"])
    if any(choice["text"] for choice in event["choices"]):
        times.texts.append(now)
    if event.get("usage"):
        times.prompt_tokens = event["usage"]["prompt_tokens"]
        times.output_tokens = event["usage"]["completion_tokens"]


async def _exchange(options: LoadOptions, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator[bytes]:
    """The lines of an answer as they come. Raises RuntimeError for a status that is not 200."""
    address = urlsplit(options.url)
    secure = ssl.create_default_context() if address.scheme == "https" else None
    port = address.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(address.hostname, port, ssl=secure, limit=1 << 22)
    try:
        writer.write(_request(options, address, method, path, body))
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        headers = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        lines = _lines(reader, is_chunked=headers.get("transfer-encoding", "").lower() == "chunked")
        if status != 200:
            raise RuntimeError(f"HTTP {status}: {_error_word(b''.join([line async for line in lines]))}")
        async for line in lines:
            yield line
    finally:
        writer.close()


def _request(options: LoadOptions, address: SplitResult, method: str, path: str, body: dict[str, Any] | None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = [
        f"{method} {address.path.rstrip('/')}{path} HTTP/1.1",
        f"Host: {address.netloc.rpartition('@')[2]}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *([f"Authorization: Bearer {options.key}"] if options.key else []),
    ]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + data


async def _lines(reader: asyncio.StreamReader, *, is_chunked: bool) -> AsyncIterator[bytes]:
    rest = b""
    while True:
        if is_chunked:
            size = int((await reader.readline()).split(b";")[0] or b"0", 16)
            data = (await reader.readexactly(size + 2))[:-2]
        else:
            data = await reader.read(1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _error_word(body: bytes) -> str:
    """What an error body says in a word, so that many are counted as one; its beginning where it is another's."""
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        code = None
    return str(code or body[:200].decode(errors="replace"))


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    p50, p95, p99 = np.percentile(seconds, [50, 95, 99]) * 1000
    return {"mean": float(np.mean(seconds)) * 1000, "p50": float(p50), "p95": float(p95), "p99": float(p99)}
