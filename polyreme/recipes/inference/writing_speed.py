"""Speed of generation on this machine, without a server: the time of a batch, and of many requests at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.errors import ConfigError
from polyreme.generation import SamplingParams, TextEngine, TextGenerator
from polyreme.recipes.weights.trained import load_writer


@dataclass(frozen=True)
class WritingLoad:
    """Made-up prompts of input_len tokens, after each of which output_len are written, greedily. seed: of the prompts.

    Raises ConfigError for lengths that the model has no positions for, when it is run.
    """

    input_len: int = 32
    output_len: int = 128
    seed: int = 0

    def prompts(self, count: int, model: Any) -> list[list[int]]:
        """Random prompts of the model's tokens, so many of them."""
        positions = model.config.seq_len
        if self.input_len + self.output_len > positions:
            raise ConfigError(
                f"bench: {self.input_len} tokens and {self.output_len} new ones, and the model has positions for "
                f"{positions}; give a smaller --input-len or --output-len"
            )
        rows = np.random.default_rng(self.seed)
        return rows.integers(0, model.config.vocab_size, (count, self.input_len)).tolist()

    @property
    def params(self) -> SamplingParams:
        """Settings of each request."""
        return SamplingParams(temperature=0, max_tokens=self.output_len, ignore_eos=True)


@dataclass(frozen=True)
class LatencyReport:
    """Seconds of each time that a batch was written, and tokens that it has."""

    batch_size: int
    output_tokens: int
    seconds: list[float]

    def as_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self) | {"percentiles": self._percentiles()})

    def lines(self) -> list[str]:
        """What to print."""
        told = "  ".join(f"{name} {value:.3f}" for name, value in self._percentiles().items())
        rate = self.output_tokens / float(np.median(self.seconds))
        return [
            f"a batch of {self.batch_size}, {len(self.seconds)} times; seconds: {told}",
            f"{rate:.1f} new tokens/s",
        ]

    def _percentiles(self) -> dict[str, float]:
        named = {"mean": float(np.mean(self.seconds))}
        return named | {f"p{p}": float(np.percentile(self.seconds, p)) for p in (10, 50, 90, 99)}


@dataclass(frozen=True)
class ThroughputReport:
    """Requests that were written at once, their tokens, and the seconds that all took."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float

    def as_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self) | self._rates())

    def lines(self) -> list[str]:
        """What to print."""
        told = ", ".join(f"{value:.2f} {name.replace('_per_second', '/s')}" for name, value in self._rates().items())
        return [f"{self.num_requests} requests in {self.seconds:.2f} s: {told}".replace("_", " ")]

    def _rates(self) -> dict[str, float]:
        counts = {
            "requests": self.num_requests,
            "tokens": self.prompt_tokens + self.output_tokens,
            "new_tokens": self.output_tokens,
        }
        return {f"{name}_per_second": count / self.seconds for name, count in counts.items()}


def latency(
    path: Path,
    load: WritingLoad,
    *,
    batch_size: int,
    num_iters: int,
    dtype: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LatencyReport:
    """Write one batch num_iters times, after once that is not counted. Raises as load_writer does."""
    model, tokenizer = load_writer(path, dtype)
    generator, prompts = TextGenerator(model, tokenizer.end), load.prompts(batch_size, model)
    seconds, written = [], 0
    for number in range(num_iters + 1):
        began = clock()
        texts = generator.generate(prompts, load.params)
        if number:  # the first compiles
            seconds.append(clock() - began)
            written = sum(len(text.token_ids) for text in texts)
    return LatencyReport(batch_size, written, seconds)


def throughput(
    path: Path,
    load: WritingLoad,
    *,
    num_prompts: int,
    max_num_seqs: int,
    dtype: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> ThroughputReport:
    """Write after many prompts that are all there at once, by a TextEngine whose programs are compiled. Raises as
    load_writer does."""
    model, tokenizer = load_writer(path, dtype)
    prompts = load.prompts(num_prompts + 1, model)
    engine = TextEngine(model, tokenizer.end, max_num_seqs=max_num_seqs, enable_prefix_caching=False)
    _write(engine, prompts[:1], load.params)
    before, began = engine.statistics, clock()
    _write(engine, prompts[1:], load.params)
    seconds, after = clock() - began, engine.statistics
    return ThroughputReport(
        num_prompts,
        after.prompt_tokens - before.prompt_tokens,
        after.generated_tokens - before.generated_tokens,
        seconds,
    )


def _write(engine: TextEngine, prompts: list[list[int]], params: SamplingParams) -> None:
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, params)
    while engine.has_unfinished:
        engine.step()
