"""Choosing the next token of each row of a batch: settings of rows that come and go, and the compiled programs."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.generation.sampling import (
    Choice,
    SamplingParams,
    counted,
    gumbel_noise,
    likeliest,
    marked,
    next_tokens,
    outweighed,
    penalized,
)
from polyreme.jit import to_static
from polyreme.kernels import select
from polyreme.nn import functional as F
from polyreme.ops import creation

READS_LATE: dict[select.Backend, bool] = {"cpu": False, "gpu": True, "tpu": True, "other": True}
"""Whether a device, by its kind, is given the next step before the tokens of the last are read. On a CPU its programs
take the cores of the host (benchmarks/results/generation_2_threads_busy_2026-11-27.md)."""

_COLUMNS: dict[str, tuple[type, float]] = {
    "seed": (np.int64, 0),
    "temperature": (np.float32, 0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1),
    "min_p": (np.float32, 0),
    "repetition_penalty": (np.float32, 1),
    "presence_penalty": (np.float32, 0),
    "frequency_penalty": (np.float32, 0),
    "least": (np.int32, 0),
}
"""Settings of rows, as arrays: dtype, and what a row without a request has."""


@dataclass
class Completion:
    """New tokens of one text; finish_reason: "stop" (an end token, which is end_token, or a stop string) or "length".

    logprobs: of each token; top_logprobs: of the likeliest ones at each place, {id: log-probability}; as asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    end_token: int | None = None

    def take(self, chosen: ChosenTokens, row: int, params: SamplingParams, end: Sequence[int], limit: int) -> bool:
        """Add the token of a row, or end with it: at one of `end`, or at `limit` tokens -> whether it was added."""
        token = int(chosen.token_ids[row])
        is_end = (token in end and not params.ignore_eos) or token in params.stop_token_ids
        if is_end and len(self.token_ids) >= params.min_tokens:
            self.finish_reason, self.end_token = "stop", token
            return False
        self.token_ids.append(token)
        if params.logprobs is not None and chosen.logprobs is not None:
            self.logprobs.append(float(chosen.logprobs[row]))
            top, ids = (part[row, : params.logprobs].tolist() for part in (chosen.top, chosen.top_ids))
            self.top_logprobs.append(dict(zip(ids, top, strict=True)))
        if len(self.token_ids) >= limit:
            self.finish_reason = "length"
        return True


class ChosenTokens(NamedTuple):
    """A token of each row, int32 [rows], -1 where the logits are not finite; where a row asked for them also its
    log-probability [rows], and the likeliest ones [rows, count] with their ids."""

    token_ids: np.ndarray
    logprobs: Any = None
    top: Any = None
    top_ids: Any = None


class TokenChoice(NamedTuple):
    """A token of each row that is chosen on the device, int32 [rows], and what else ChosenTokens has where it was asked
    for: the host need not have waited for any of it."""

    token_ids: Any
    likeliest: tuple[Any, ...] = ()

    def read(self) -> ChosenTokens:
        """The same on the host, when the device has it."""
        return ChosenTokens(self.token_ids.numpy(), *(part.numpy() for part in self.likeliest))


def next_inputs(chosen: Any, known: Any) -> Any:
    """The tokens that a Decoder takes in next, int64 [rows, 1]: those that were chosen, int32 [rows], but where `known`
    says others, which are not below 0."""
    return (known < 0).where(chosen.clip(min=0), known).astype("int64").unsqueeze(1)


class TokenGrammar(Protocol):
    """A grammar of a text, token by token.

    group_start: first id of a group, the last ids of the vocabulary: where they together are likelier than each other
    token that may come, one of them comes. None for no group.
    """

    @property
    def group_start(self) -> int | None: ...

    @property
    def is_done(self) -> bool:
        """Whether the text is whole, and nothing can follow."""
        ...

    def allowed(self) -> np.ndarray:
        """The tokens that may come next, bool [vocab], at least one of them."""
        ...

    def take(self, token: int) -> None:
        """Go on by a token of those."""
        ...

    def copy(self) -> TokenGrammar:
        """The same for another text, from here on."""
        ...


class SuppressedTokens:
    """A TokenGrammar of any text of `vocab_size` tokens, or what another grammar allows, without these; at_first:
    others that it does not begin with.

    >>> text = SuppressedTokens(4, [2], at_first=[0])
    >>> text.allowed().tolist()
    [False, True, False, True]
    >>> text.take(3)
    >>> text.allowed().tolist()
    [True, True, False, True]
    """

    def __init__(
        self,
        vocab_size: int,
        tokens: Sequence[int],
        at_first: Sequence[int] = (),
        grammar: TokenGrammar | None = None,
    ) -> None:
        self._grammar, self.group_start = grammar, None if grammar is None else grammar.group_start
        self._later = np.ones(vocab_size, bool)
        self._later[[token for token in tokens if token < vocab_size]] = False
        self._next = self._later.copy()
        self._next[[token for token in at_first if token < vocab_size]] = False

    @property
    def is_done(self) -> bool:
        """Whether the other grammar's text is whole."""
        return self._grammar is not None and self._grammar.is_done

    def allowed(self) -> np.ndarray:
        """The tokens that may come next; all of the other grammar's, where no other one is left."""
        if self._grammar is None:
            return self._next
        allowed = self._grammar.allowed()
        left = allowed & self._next
        return left if left.any() else allowed

    def take(self, token: int) -> None:
        """Go on by a token of those."""
        self._next = self._later
        if self._grammar is not None:
            self._grammar.take(token)

    def copy(self) -> SuppressedTokens:
        """The same for another text."""
        other = copy.copy(self)
        other._grammar = None if self._grammar is None else self._grammar.copy()
        return other


class DraftRow(NamedTuple):
    """A row on which a token is chosen for the text of another one, `owner`, after drafted tokens."""

    row: int
    owner: int
    tokens: Sequence[int]


class _ChoiceKind(NamedTuple):
    """What choosing a token of each row takes: whether tokens that were seen are penalized, whether those that were
    written are by how often, whether texts have a least length, whether a text has a grammar, whether one's has a
    group, and whether a text has biases."""

    choice: Choice
    penalty: bool
    counts: bool
    least: bool
    grammar: bool
    group: bool
    bias: bool


class TokenChooser:
    """Chooses a token of each of `rows` rows by the settings of each.

    A row's token and log-probabilities are the same bits whatever the settings of the others: noise and
    log-probabilities are made by programs of their own, which all kinds of settings share. A row without a text of its
    own may choose for another's, after tokens that may come next. end, num_known: as of TextGenerator.
    """

    vocab_size: int
    num_known: int
    end: tuple[int, ...]

    def __init__(self, rows: int, vocab_size: int, num_known: int, end: Sequence[int]) -> None:
        self.vocab_size, self.num_known, self.end = vocab_size, num_known, tuple(end)
        self._seen = creation.zeros([rows, vocab_size], "bool")
        self._params: list[SamplingParams | None] = [None] * rows
        self._grammars: list[TokenGrammar | None] = [None] * rows
        self._columns = {name: np.full(rows, default, dtype) for name, (dtype, default) in _COLUMNS.items()}
        self._settings: list[Tensor] | None = None
        self._choices: dict[_ChoiceKind, Callable[..., Any]] = {}
        self._noise = to_static(functools.partial(gumbel_noise, count=vocab_size))
        self._logs = to_static(functools.partial(F.log_softmax, axis=-1))
        self._tops: dict[int, Callable[..., tuple[Any, ...]]] = {}
        self._bias: Tensor | None = None  # made when it is asked for: of large vocabularies it is large
        self._counts: Tensor | None = None  # likewise
        self._fork, self._fork_counts = to_static(self._forked), to_static(self._forked_counts)
        self._unmarked: dict[int, list[int]] = {}

    def begin(
        self,
        row: int,
        params: SamplingParams,
        tokens: Sequence[int],
        prompt_length: int,
        grammar: TokenGrammar | None = None,
    ) -> None:
        """Choose for a row by these settings from now on; tokens: the prompt, and what of the text is there already.
        grammar: says which tokens may be chosen."""
        self._params[row], self._grammars[row], self._settings = params, grammar, None
        self._unmarked.pop(row, None)
        for name, column in self._columns.items():
            column[row] = prompt_length + params.min_tokens if name == "least" else getattr(params, name)
        if params.logit_bias:
            bias = np.zeros(self.vocab_size, np.float32)
            bias[list(params.logit_bias)] = list(params.logit_bias.values())
            if self._bias is None:
                self._bias = creation.zeros([len(self._params), self.vocab_size], "float32")
            self._bias[row] = to_tensor(bias)
        elif self._bias is not None:
            self._bias[row] = 0.0
        if params.repetition_penalty != 1:
            seen = np.zeros(self.vocab_size, bool)
            seen[np.asarray(tokens)] = True
            self._seen[row] = to_tensor(seen)
        if params.is_counting:
            if self._counts is None:
                self._counts = creation.zeros([len(self._params), self.vocab_size], "int32")
            written = np.asarray(tokens[prompt_length:], np.int64)
            self._counts[row] = to_tensor(np.bincount(written, minlength=self.vocab_size).astype(np.int32))

    def leave(self, row: int) -> None:
        """Choose nothing for a row from now on."""
        self._params[row], self._grammars[row], self._settings = None, None, None
        for name, (_, default) in _COLUMNS.items():
            self._columns[name][row] = default

    def note(self, row: int, tokens: Sequence[int]) -> None:
        """A row's text goes on by tokens that were chosen on others."""
        params = self._params[row]
        if params is not None and (params.repetition_penalty != 1 or params.is_counting):
            self._unmarked.setdefault(row, []).extend(tokens)

    def __call__(self, logits: Any, lengths: Any, drafts: Sequence[DraftRow] = ()) -> TokenChoice:
        """A token of each row by logits [rows, vocab]; lengths: int32 [rows], of the texts that they follow. drafts:
        the rows that choose for others."""
        known = [params for params in self._params if params is not None]
        choices: list[Choice] = ["greedy", *(p.choice for p in known)]
        kind = _ChoiceKind(
            max(choices, key=("greedy", "draw", "filter").index),
            any(p.repetition_penalty != 1 for p in known),
            any(p.is_counting for p in known),
            bool(self.end) and any(p.min_tokens for p in known),
            any(grammar is not None for grammar in self._grammars),
            any(grammar is not None and grammar.group_start is not None for grammar in self._grammars),
            any(p.logit_bias for p in known),
        )
        if kind not in self._choices:
            self._choices[kind] = to_static(functools.partial(self._choose, kind))
        if (kind.penalty or kind.counts) and (drafts or self._unmarked):
            forks = self._fork_arguments(drafts)
            if kind.penalty:
                self._fork(*forks)
            if kind.counts:
                self._fork_counts(*forks)
        if self._settings is None:
            self._settings = [to_tensor(column) for column in self._columns.values()]
        seeds, *rest = self._settings
        if drafts:
            owners = self._owners(drafts)
            seeds, *rest = (to_tensor(column[owners]) for column in self._columns.values())
        noise = None if kind.choice == "greedy" else self._noise(seeds, lengths.astype("int64"))
        allowed = self._allowed(drafts) if kind.grammar else None
        groups = self._groups(drafts) if kind.group else None
        bias = None
        if kind.bias and self._bias is not None:
            bias = self._bias.index_select(to_tensor(self._owners(drafts)), 0) if drafts else self._bias
        tokens = self._choices[kind](logits, lengths, noise, allowed, groups, bias, *rest)
        counts = [p.logprobs for p in known if p.logprobs is not None]
        if not counts:
            return TokenChoice(tokens)
        return TokenChoice(tokens, self.log_probabilities(logits, tokens.clip(min=0), max(counts)))

    def log_probabilities(self, logits: Any, tokens: Any, count: int) -> tuple[Any, ...]:
        """By logits [rows, vocab], of any number of rows: of a token of each [rows], and the `count` largest, at least
        one, with their ids."""
        count = min(max(1, count), self.vocab_size)
        if count not in self._tops:
            self._tops[count] = to_static(functools.partial(likeliest, count=count))
        return self._tops[count](self._logs(logits), tokens)

    def _owners(self, drafts: Sequence[DraftRow]) -> np.ndarray:
        """The row whose settings each row has."""
        owners = np.arange(len(self._params))
        for draft in drafts:
            owners[draft.row] = draft.owner
        return owners

    def _fork_arguments(self, drafts: Sequence[DraftRow]) -> tuple[Tensor, Tensor]:
        """For each row its owner, and the tokens that the owner's row is not marked with."""
        texts = dict(self._unmarked)
        texts |= {draft.row: [*self._unmarked.get(draft.owner, ()), *draft.tokens] for draft in drafts}
        self._unmarked = {}
        width = 8
        while width < max(map(len, texts.values()), default=0):
            width *= 2
        tokens = np.full((len(self._params), width), -1, np.int32)
        for row, text in texts.items():
            tokens[row, : len(text)] = text
        return to_tensor(self._owners(drafts)), to_tensor(tokens)

    def _allowed(self, drafts: Sequence[DraftRow]) -> Tensor:
        """The tokens that grammars allow, bool [rows, vocab]."""
        allowed = np.ones((len(self._grammars), self.vocab_size), bool)
        for row, grammar in enumerate(self._grammars):
            if grammar is not None:
                allowed[row] = grammar.allowed()
        for draft in drafts:
            grammar = self._grammars[draft.owner]
            if grammar is not None:
                ahead = grammar.copy()
                for token in draft.tokens:
                    ahead.take(token)
                if not ahead.is_done:
                    allowed[draft.row] = ahead.allowed()
        return to_tensor(allowed)

    def _groups(self, drafts: Sequence[DraftRow]) -> Tensor:
        """The first id of the group of each row's grammar, int32 [rows]; vocab_size where it has none."""
        starts = [None if grammar is None else grammar.group_start for grammar in self._grammars]
        groups = np.array([self.vocab_size if start is None else start for start in starts], np.int32)
        return to_tensor(groups[self._owners(drafts)])

    # what is captured

    def _forked(self, owners: Any, tokens: Any) -> None:
        marked(self._seen.index_select(owners, 0), tokens, out=self._seen)

    def _forked_counts(self, owners: Any, tokens: Any) -> None:
        assert self._counts is not None  # made when a text that counts began
        counted(self._counts.index_select(owners, 0), tokens, out=self._counts)

    def _choose(
        self,
        kind: _ChoiceKind,
        logits: Any,
        lengths: Any,
        noise: Any,
        allowed: Any,
        groups: Any,
        bias: Any,
        temperature: Any,
        top_k: Any,
        top_p: Any,
        min_p: Any,
        penalty: Any,
        presence: Any,
        frequency: Any,
        least: Any,
    ) -> Any:
        scores = logits + bias if kind.bias else logits
        scores = penalized(scores, self._seen, penalty) if kind.penalty else scores
        if kind.counts:
            counts: Any = self._counts
            scores = scores - presence.unsqueeze(1) * (counts > 0).astype(scores.dtype)
            scores = scores - frequency.unsqueeze(1) * counts.astype(scores.dtype)
        hidden = creation.arange(logits.shape[-1], dtype="int32").unsqueeze(0) >= self.num_known
        if kind.least:
            ids = creation.arange(logits.shape[-1], dtype="int32")
            is_end = functools.reduce(operator.or_, [ids == end for end in self.end])
            hidden = hidden | (is_end.unsqueeze(0) & (lengths < least).unsqueeze(1))
        if kind.grammar:
            hidden = hidden | ~allowed
        scores = scores.masked_fill(hidden, -np.inf)
        scores = outweighed(scores, groups) if kind.group else scores
        tokens = next_tokens(scores, noise, temperature, top_k, top_p, min_p, choice=kind.choice)
        tokens = tokens.masked_fill(~logits.isfinite().all(-1), -1)
        if kind.penalty:
            marked(self._seen, tokens.unsqueeze(1), out=self._seen)
        if kind.counts:
            counted(self._counts, tokens.unsqueeze(1), out=self._counts)
        return tokens
