"""The questions of evaluation to a model: log-probabilities of tokens after others, and texts after prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash

from polyreme.errors import DataError
from polyreme.generation.engine import TextEngine
from polyreme.generation.sampling import SamplingParams
from polyreme.generation.text_stream import TextStream
from polyreme.generation.tokenizer import TextTokenizer


@dataclass(frozen=True)
class ScoredTokens:
    """Scores of a text's tokens but the first: the log-probability of each after those before it, float64 [n - 1], and
    whether it was the likeliest, bool [n - 1]."""

    logprobs: np.ndarray
    is_likeliest: np.ndarray


class Scorer(Protocol):
    """A model in this process or behind a server."""

    @property
    def max_tokens(self) -> int:
        """Tokens of a text that can be scored."""
        ...

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation up to where the answer begins."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        ...

    def token_id(self, name: str) -> int | None:
        """The id of bos_token or eos_token, None where there is none."""
        ...

    def score(self, texts: Sequence[Sequence[int]]) -> list[ScoredTokens]:
        """Of each text, token ids, how likely its tokens are."""
        ...

    def write(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[str]:
        """The text after each prompt."""
        ...

    def facts(self) -> dict[str, Any]:
        """What results depend on: model, dtype, plan, digest of the chat template."""
        ...


def template_digest(template: str | None) -> str | None:
    """The digest of a chat template that a result stores: xxh3_128, hex.

    >>> template_digest(None), len(template_digest("{{ messages }}"))
    (None, 32)
    """
    return None if template is None else xxhash.xxh3_128_hexdigest(template.encode())


class EngineScorer:
    """A TextEngine with its tokenizer, as the server has them: numbers are the same bits as the server's.

    facts: name of the model, dtype and plan.
    """

    engine: TextEngine
    tokenizer: TextTokenizer

    def __init__(self, engine: TextEngine, tokenizer: TextTokenizer, facts: Mapping[str, Any]) -> None:
        self.engine, self.tokenizer, self._facts = engine, tokenizer, dict(facts)
        self._count = 0

    @property
    def max_tokens(self) -> int:
        """One less than the engine's, as it writes a token after each text."""
        return self.engine.max_model_len - 1

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text."""
        return self.tokenizer.encode(text, add_special_tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation up to where the answer begins."""
        return self.tokenizer.encode_chat(messages)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def token_id(self, name: str) -> int | None:
        """The id of bos_token or eos_token, None where there is none."""
        token = self.tokenizer.special_tokens.get(name)
        if token is None and name == "eos_token" and self.tokenizer.end:
            return self.tokenizer.end[0]
        return None if token is None else self.tokenizer.tokenizer.token_to_id(token)

    def score(self, texts: Sequence[Sequence[int]]) -> list[ScoredTokens]:
        """Of each text, token ids, how likely its tokens are."""
        names = [self._name() for _ in texts]
        last = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        for name, ids in zip(names, texts, strict=True):
            self.engine.add(name, ids, last, prompt_logprobs=1)
        scored = {}
        for output in self._outputs():
            if output.prompt_logprobs or output.finish_reason:
                best = np.array([max(top.values()) for top in output.prompt_top_logprobs])
                logprobs = np.array(output.prompt_logprobs)
                scored[output.request_id] = ScoredTokens(logprobs, logprobs >= best)
        return [scored[name] for name in names]

    def write(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[str]:
        """The text after each prompt."""
        names = [self._name() for _ in prompts]
        streams = {name: TextStream(self.tokenizer, params.stop, params.min_tokens) for name in names}
        texts = dict.fromkeys(names, "")
        for name, ids in zip(names, prompts, strict=True):
            self.engine.add(name, ids, params)
        for output in self._outputs():
            name, stream = output.request_id, streams[output.request_id]
            was_stopped = stream.stopped
            texts[name] += "".join(stream.add([token]) for token in output.token_ids)
            if stream.stopped and not was_stopped:
                self.engine.abort(name)
            elif output.finish_reason:
                texts[name] += stream.finish()
        return [texts[name] for name in names]

    def facts(self) -> dict[str, Any]:
        """What results depend on: model, dtype, plan, digest of the chat template."""
        return {**self._facts, "template": template_digest(self.tokenizer.template)}

    def _name(self) -> str:
        self._count += 1
        return f"evaluation-{self._count}"

    def _outputs(self) -> Iterable[Any]:
        while self.engine.has_unfinished:
            for output in self.engine.step():
                if output.finish_reason == "error":
                    raise DataError(f"{self._facts.get('model')}: its logits are not finite for a text of the data")
                yield output
