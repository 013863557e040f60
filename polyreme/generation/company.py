"""Whether requests get the same bits in any company, shown by writing them alone and in several companies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyreme.generation.engine import StepOutput, TextEngine
from polyreme.generation.sampling import SamplingParams

_LONGEST = 240
"""Tokens of a prompt that is made up, at most: three chunks and what is left, of the usual size."""
_NEW = 16

Request = tuple[list[int], SamplingParams]


@dataclass(frozen=True)
class CompanyCheck:
    """Requests in one company against the same alone: tokens that were written, tokens of prompts that were known, how
    often a request gave way to others, and where the first one differs, if one does."""

    name: str
    num_requests: int
    num_tokens: int
    num_known: int
    num_preemptions: int
    difference: str | None

    def __str__(self) -> str:
        result = "the same bits" if self.difference is None else f"DIFFERENT: {self.difference}"
        return (
            f"{self.name:24} {self.num_requests:3} requests {self.num_tokens:5} tokens {self.num_known:5} known "
            f"{self.num_preemptions:3} preempted  {result}"
        )


def check_company(
    model: Any, end: Sequence[int] = (), num_known: int | None = None, *, num_requests: int = 10, seed: int = 0
) -> Iterator[CompanyCheck]:
    """Write made-up requests alone, nothing known, then in companies -> a check of each company.

    Tokens, log-probabilities and the likeliest tokens are compared bit by bit. The engine has fewer blocks than its
    rows could use, so that requests are preempted.
    """
    longest = min(model.config.seq_len, _LONGEST + _NEW)
    block_size = max(1, min(16, longest // 8))
    chunk = block_size * max(1, min(64, longest // 4) // block_size)
    engine = TextEngine(
        model,
        end,
        num_known,
        max_num_seqs=8,
        max_model_len=longest,
        block_size=block_size,
        num_blocks=3 * -(-longest // block_size),
        prefill_chunk=chunk,
    )
    rows = np.random.default_rng(seed)
    requests = [_made_up(rows, number, engine, model.config.vocab_size) for number in range(num_requests)]
    alone = {}
    for number in range(num_requests):
        engine.forget_prefixes()
        alone |= _written(engine, {str(number): requests[number]}, rows, 0)
    companies: dict[str, Callable[[], dict[str, Request]]] = {
        "all at once": lambda: {str(number): request for number, request in enumerate(requests)},
        "in another order": lambda: {str(n): requests[n] for n in rows.permutation(num_requests).tolist()},
        "with known beginnings": lambda: {str(number): request for number, request in enumerate(requests)},
    }
    for name, company in companies.items():
        if name != "with known beginnings":
            engine.forget_prefixes()
        yield _check(name, engine, company(), alone, rows, 0)
    engine.forget_prefixes()
    yield _check("coming and going", engine, companies["in another order"](), alone, rows, 4)


def _made_up(rows: np.random.Generator, number: int, engine: TextEngine, vocab: int) -> Request:
    """A prompt of random tokens, every second one after what such ones share, and settings of several kinds."""
    shared = np.random.default_rng(0).integers(0, vocab, engine.max_model_len)
    most = engine.max_model_len - min(_NEW, engine.max_model_len // 2)
    length = int(rows.integers(1, most + 1))
    prompt = rows.integers(0, vocab, length)
    if number % 2:
        same = int(rows.integers(0, length))
        prompt[:same] = shared[:same]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 1.2, "top_p": 0.9, "top_k": 50},
        {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 2},
    ]
    params = SamplingParams(seed=number, max_tokens=_NEW, logprobs=number % 4, **kinds[number % len(kinds)])
    return prompt.tolist(), params


def _written(
    engine: TextEngine, requests: dict[str, Request], rows: np.random.Generator, num_passing: int
) -> dict[str, list[StepOutput]]:
    """What each request gets; num_passing: steps at most between two that come, beside each another that is aborted."""
    outputs: dict[str, list[StepOutput]] = {name: [] for name in requests}

    def step() -> None:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)

    for name, request in requests.items():
        if num_passing:
            engine.add(f"{name} leaves", *request)
            for _ in range(int(rows.integers(1, num_passing + 1))):
                step()
        engine.add(name, *request)
        engine.abort(f"{name} leaves")
    while engine.has_unfinished:
        step()
    return outputs


def _check(
    name: str,
    engine: TextEngine,
    requests: dict[str, Request],
    alone: dict[str, list[StepOutput]],
    rows: np.random.Generator,
    num_passing: int,
) -> CompanyCheck:
    before = engine.statistics
    outputs = _written(engine, requests, rows, num_passing)
    after = engine.statistics
    return CompanyCheck(
        name,
        len(requests),
        sum(len(output.token_ids) for request in requests for output in outputs[request]),
        after.prefix_tokens_hit - before.prefix_tokens_hit,
        after.num_preemptions - before.num_preemptions,
        next((text for request in requests if (text := _difference(request, alone[request], outputs[request]))), None),
    )


def _difference(name: str, alone: list[StepOutput], together: list[StepOutput]) -> str | None:
    """Where the first token of a request differs."""
    for place in range(max(len(alone), len(together))):
        one, other = (steps[place] if place < len(steps) else None for steps in (alone, together))
        if one is None or other is None or (one.token_ids, one.finish_reason) != (other.token_ids, other.finish_reason):
            return f"token {place} of request {name} is another one"
        if (one.logprobs, one.top_logprobs) != (other.logprobs, other.top_logprobs):
            return f"log-probabilities at token {place} of request {name}: {one.logprobs} alone, {other.logprobs} here"
    return None
