"""Whether requests get the same bits in any company, shown by writing them alone and in several companies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from polyreme.generation.engine import StepOutput, TextEngine
from polyreme.generation.sampling import SamplingParams
from polyreme.generation.speculation import Speculation

_LONGEST = 240
"""Tokens of a prompt that is made up, at most: three chunks and what is left, of the usual size."""
_NEW = 16

Request = tuple[list[int], SamplingParams]


@dataclass(frozen=True)
class CompanyCheck:
    """Requests in one company against the same alone: tokens that were written, tokens of prompts that were known, how
    often a request gave way to others, drafted tokens that were met, and where the first one differs, if one does."""

    name: str
    num_requests: int
    num_tokens: int
    num_known: int
    num_preemptions: int
    num_accepted: int
    difference: str | None

    def __str__(self) -> str:
        result = "the same bits" if self.difference is None else f"DIFFERENT: {self.difference}"
        return (
            f"{self.name:24} {self.num_requests:3} requests {self.num_tokens:5} tokens {self.num_known:5} known "
            f"{self.num_preemptions:3} preempted {self.num_accepted:4} drafted  {result}"
        )


def check_company(
    model: Any, end: Sequence[int] = (), num_known: int | None = None, *, num_requests: int = 10, seed: int = 0
) -> Iterator[CompanyCheck]:
    """Write made-up requests alone, nothing known, then in companies -> a check of each company.

    Tokens, log-probabilities and the likeliest tokens are compared bit by bit. The engine has fewer blocks than its
    rows could use, so that requests are preempted. At last the next tokens are drafted, of models whose blocks keep no
    states: as they were alone, but for every third one.
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
        speculation=None if model.has_states else Speculation(max_loss=math.inf),
    )
    engine.drafter = None
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
    texts = [
        (prompt, [t for output in alone[str(n)] for t in output.token_ids]) for n, (prompt, _) in enumerate(requests)
    ]
    if model.has_states:
        return  # which are not drafted for
    engine.drafter = _RecallDrafter([prompt + text for prompt, text in texts], model.config.vocab_size)
    yield _check("with drafts", engine, companies["all at once"](), alone, rows, 0)
    yield _check("with drafts, coming", engine, companies["in another order"](), alone, rows, 4)


class _RecallDrafter:
    """Proposes how texts went on that are known, every third token wrong; as of Drafter."""

    def __init__(self, texts: list[list[int]], vocab_size: int) -> None:
        self._texts, self._vocab_size = texts, vocab_size

    def begin(self, row: int, params: SamplingParams) -> None:
        """Nothing is to be done."""

    def leave(self, row: int) -> None:
        """Nothing is to be done."""

    def propose(self, texts: Mapping[int, Sequence[int]], counts: Mapping[int, int]) -> dict[int, list[int]]:
        """What comes next in the text that begins so."""
        drafts = {}
        for row, text in texts.items():
            whole = next((known for known in self._texts if known[: len(text)] == list(text)), [])
            ahead = list(enumerate(whole))[len(text) : len(text) + counts[row]]
            drafts[row] = [(token + (place % 3 == 0)) % self._vocab_size for place, token in ahead]
        return drafts


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
        {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 2, "frequency_penalty": 0.4},
    ]
    params = SamplingParams(seed=number, max_tokens=_NEW, logprobs=number % 4, **kinds[number % len(kinds)])
    return prompt.tolist(), params


def _written(
    engine: TextEngine, requests: dict[str, Request], rows: np.random.Generator, num_passing: int
) -> dict[str, list[StepOutput]]:
    """The outputs of each request; num_passing: steps at most between two that come, beside each another that is
    aborted."""
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
        after.accepted_tokens - before.accepted_tokens,
        next((text for request in requests if (text := _difference(request, alone[request], outputs[request]))), None),
    )


def _difference(name: str, alone: list[StepOutput], together: list[StepOutput]) -> str | None:
    """The first difference between a request's outputs, in words, however the tokens were grouped in steps; None if
    none."""
    one, other = ([token for output in outputs for token in _tokens(output)] for outputs in (alone, together))
    for place, (mine, theirs) in enumerate(zip_longest(one, other)):
        if mine is None or theirs is None or mine[0] != theirs[0]:
            return f"token {place} of request {name} is another one"
        if mine != theirs:
            return f"log-probabilities at token {place} of request {name}: {mine[1]} alone, {theirs[1]} here"
    if not alone or not together or alone[-1].finish_reason != together[-1].finish_reason:
        return f"the end of request {name} is another one"
    return None


def _tokens(output: StepOutput) -> list[tuple[int, float | None, dict[int, float] | None]]:
    """Each token of a step with its log-probability and the likeliest ones, where they were asked for."""
    count = len(output.token_ids)
    nothing = [None] * count
    return list(zip(output.token_ids, output.logprobs or nothing, output.top_logprobs or nothing, strict=True))
