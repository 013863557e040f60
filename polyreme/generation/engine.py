"""Continuous batching: requests join and leave between steps, and share the blocks of one cache."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

import jax
import numpy as np

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.generation.block_pool import BlockPool, block_keys
from polyreme.generation.blockwise import BlockwiseSteps
from polyreme.generation.choosing import (
    READS_LATE,
    ChosenTokens,
    Completion,
    DraftRow,
    TokenChoice,
    TokenChooser,
    TokenGrammar,
    next_inputs,
)
from polyreme.generation.prompt_vectors import PromptVectors, are_equal, insert_vectors
from polyreme.generation.sampling import SamplingParams
from polyreme.generation.speculation import Drafter, DraftGate, Speculation
from polyreme.jit import to_static
from polyreme.kernels import select
from polyreme.models.parts.cache import PagedCache, PagedRows
from polyreme.nn.layers.lora_rows import AdapterRows
from polyreme.ops import creation

_ROOM_A_SEQUENCE = 2048
"""Tokens of each sequence that the cache has blocks for where num_blocks does not say; fewer if they cannot be more."""
_UNREAD = -1
"""A token that the device has chosen and the host has not read."""


@dataclass
class StepOutput:
    """The output of a step for a request: new tokens, and of each what its settings ask for, as of Completion.

    finish_reason: None while it goes on; "stop", "length", or "error" where logits were not finite. num_cached: tokens
    of the prompt that were known from another. prompt_logprobs, prompt_top_logprobs: those of the prompt's tokens but
    the first, where they are asked for, beside the first new token.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached: int = 0
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[dict[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class EngineStatistics:
    """Counts at one moment: requests that run and wait, blocks in use; and since the beginning: tokens of prompts
    looked for among known ones and found, preemptions, tokens, tokens drafted and those of them that were met, and
    requests by how they ended, "abort" among them."""

    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_blocks: int
    prefix_tokens_queried: int
    prefix_tokens_hit: int
    num_preemptions: int
    prompt_tokens: int
    generated_tokens: int
    draft_tokens: int
    accepted_tokens: int
    finished: dict[str, int]


@dataclass
class _Sequence:
    """A request on its way. keys: of its prompt's full blocks. num_in: its tokens that are in the cache, or will be
    when the device has done what it was given. num_unread: tokens that were chosen and not read yet. num_scored: so
    many of the likeliest tokens are told of at each place of the prompt. adapter: that writes it, None for the model
    itself. vectors: what stands in the prompt in place of embeddings."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    limit: int
    arrival: int
    keys: list[bytes]
    num_scored: int | None = None
    grammar: TokenGrammar | None = None
    adapter: str | None = None
    vectors: PromptVectors | None = None
    completion: Completion = field(default_factory=Completion)
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    num_in: int = 0
    num_unread: int = 0
    num_cached: int = 0
    was_started: bool = False
    gate: DraftGate | None = None
    is_choosing: bool = False
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[dict[int, float]] = field(default_factory=list)

    @property
    def is_scoring(self) -> bool:
        return self.num_scored is not None and not self.completion.token_ids

    @property
    def is_prefilling(self) -> bool:
        return self.num_in < len(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.completion.token_ids) + self.num_unread

    @property
    def next_tokens(self) -> list[int]:
        """The tokens after those that are in the cache, of a prompt that is in."""
        return self.completion.token_ids[self.num_in - len(self.prompt) :] + [_UNREAD] * self.num_unread

    @property
    def is_whole(self) -> bool:
        """Whether it has all its tokens, though the last may not be read."""
        return len(self.completion.token_ids) + self.num_unread >= self.limit


@dataclass
class _Feed:
    """Tokens of a sequence that a round decodes, and the row of each: known ones, then drafts. num_in: tokens before
    them, num_tokens: all that there were when the round began."""

    sequence: _Sequence
    tokens: list[int]
    rows: list[int]
    num_in: int
    num_tokens: int
    drafts: list[int] = field(default_factory=list)
    num_met: int = 0

    @property
    def is_choosing(self) -> bool:
        """Whether tokens are chosen after these: all that there are are then among them."""
        return self.num_in + len(self.tokens) == self.num_tokens

    @property
    def choosing_rows(self) -> list[int]:
        """The rows after which a token is chosen: that of the last known token, then those of the drafts."""
        return self.rows[len(self.tokens) - 1 :] if self.is_choosing else []


@dataclass(frozen=True, eq=False)
class _KnownPrompt:
    """A prompt in the cache that other requests have too, its blocks, and the logits [1, vocab] after it."""

    sequence: _Sequence
    blocks: list[int]
    logits: Any

    def is_of(self, sequence: _Sequence) -> bool:
        """Whether a sequence, whose prompt is not in yet, may go on from here."""
        mine = self.sequence
        if not sequence.is_prefilling or sequence.is_scoring or sequence.adapter != mine.adapter:
            return False
        return sequence.prompt == mine.prompt and are_equal(sequence.vectors, mine.vectors)


@dataclass(frozen=True)
class _RoundWork:
    """The work of a round: tokens of each sequence that decodes, sequences that go on from a known prompt, and a part
    of one prompt."""

    decoding: list[_Feed]
    joining: list[tuple[_Sequence, _KnownPrompt]]
    prefilling: _Sequence | None
    count: int


@dataclass(frozen=True)
class _Round:
    """A round that the device was given. choice: of a token after each of `feeds`, None where there are none; results:
    what there is when it has ended. began, drafted: seconds at its beginning and after drafts were made. is_plain:
    whether it only decodes."""

    feeds: list[_Feed]
    choice: TokenChoice | None
    results: Any
    began: float
    drafted: float
    is_plain: bool


class _PlacedRows:
    """The rows of a cache as they lie on the device, which is told what is other than it has it."""

    def __init__(self, rows: PagedRows) -> None:
        self._rows = rows
        self._lengths, self._tables, self._slots = self.empty()

    def empty(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Lengths, block tables and slots of rows without a sequence."""
        lengths = np.zeros(self._rows.lengths.shape, np.int32)
        return lengths, np.full(self._rows.block_tables.shape, -1, np.int32), np.full_like(lengths, -1)

    def place(self, lengths: np.ndarray, tables: np.ndarray, slots: np.ndarray) -> None:
        """Give each row its length, its blocks and its slot."""
        if not np.array_equal(lengths, self._lengths):
            self._rows.lengths.set_value(lengths)
        if not np.array_equal(tables, self._tables):
            self._rows.block_tables.set_value(tables)
        if not np.array_equal(slots, self._slots):
            self._rows.slots.set_value(slots)
        self._lengths, self._tables, self._slots = lengths, tables, slots

    def grew(self, counts: np.ndarray) -> None:
        """The device has made the rows longer."""
        self._lengths = self._lengths + counts


class TextEngine:
    """Writes for many requests at once with a Decoder, which is put into evaluation mode.

    A step takes in a part of one prompt and makes a token of every request that runs. Prompts are taken in by chunks of
    prefill_chunk tokens, always at the same places, and all max_num_seqs rows are decoded by one program whether they
    are in use or not, so that the tokens and log-probabilities of a request are the same bits alone, in any batch,
    after a prefix that was known, and after a preemption.

    Keys and values are in num_blocks blocks of block_size tokens. Full chunks of prompts are kept while no other needs
    the blocks, for prompts that begin the same (enable_prefix_caching; if None, in models whose blocks keep no states,
    which are of no beginning). Where blocks run out the request that came last gives its own back, and is taken in
    again later: its prompt by chunks, its text by the decoding program, as before.
    Requests with the same prompt that are there together take it in once. prompt_sizes: tokens of the programs that
    take in prompts.

    An accelerator is given the next round before the tokens of the last are read, which it takes from its own memory. A
    text that turns out to have ended is then one token ahead, which is thrown away. Where the host has to know a token
    first, for a grammar or to draft what follows, the next round waits for it.

    speculation: rows without a request verify tokens that are drafted for the others, by the program that would make
    them one after another, so that the bits are the same with and without; where all rows are in use nothing is
    drafted. drafter: what proposes them, which may be taken away and given back between steps.

    adapters: what models.files.adapters.place_adapters returned of the model, so that requests may name one; those of
    several are written in the same steps. kv_cache_dtype: of keys and values, as of KVCache: int8 for codes with a
    scale for each head and token.

    max_model_len: tokens of a prompt and its text at most, the model's positions if None. num_blocks: if None, enough
    for 2,048 tokens of each row and for one text of max_model_len. end, num_known: as of TextGenerator. One thread at a
    time. Raises ConfigError for sizes that do not fit.
    """

    max_model_len: int
    block_size: int
    prefill_chunk: int
    max_num_seqs: int
    enable_prefix_caching: bool
    cache: PagedCache
    prompt_sizes: list[int]

    def __init__(
        self,
        model: Any,
        end: Sequence[int] = (),
        num_known: int | None = None,
        *,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        prefill_chunk: int = 64,
        enable_prefix_caching: bool | None = None,
        speculation: Speculation | None = None,
        adapters: AdapterRows | None = None,
        kv_cache_dtype: Any = None,
    ) -> None:
        positions = model.config.seq_len
        self.max_model_len = positions if max_model_len is None else max_model_len
        if not 1 < self.max_model_len <= positions:
            raise ConfigError(
                f"TextEngine: max_model_len={max_model_len}; the model has positions for 2 to {positions}"
            )
        if max_num_seqs < 1 or block_size < 1 or prefill_chunk < 1 or prefill_chunk % block_size:
            raise ConfigError(
                f"TextEngine: max_num_seqs={max_num_seqs}, block_size={block_size}, prefill_chunk={prefill_chunk}; "
                "give at least 1 of each, and whole blocks to a chunk"
            )
        longest = -(-self.max_model_len // block_size)
        usual = max(longest, max_num_seqs * min(longest, -(-_ROOM_A_SEQUENCE // block_size)))
        total_blocks: int = usual if num_blocks is None else num_blocks
        if total_blocks < 1:
            raise ConfigError(f"TextEngine: num_blocks={num_blocks}; give at least 1, {longest} for the longest text")
        model.eval()
        vocab = model.config.vocab_size
        self.block_size, self.prefill_chunk = block_size, prefill_chunk
        self.max_num_seqs = max_num_seqs
        self._vocab, self._width, self._end = vocab, model.config.hidden_size, tuple(end)
        self._pool = BlockPool(total_blocks)
        self.cache = PagedCache(model, total_blocks, block_size, kv_cache_dtype, max_num_seqs)
        self._has_states = model.has_states
        if self._has_states and enable_prefix_caching:
            name = type(model).__name__
            raise ConfigError(
                f"TextEngine: a {name} keeps states, which are of no beginning; leave enable_prefix_caching out"
            )
        self.enable_prefix_caching = not self._has_states if enable_prefix_caching is None else enable_prefix_caching
        self._rows = self.cache.rows(max_num_seqs, self.max_model_len)
        prompt_row = self.cache.rows(1, self.max_model_len)
        self._decode = BlockwiseSteps(model, self._rows, is_first=False)
        self._prefill = BlockwiseSteps(model, prompt_row, is_first=False)
        self._placed, self._placed_prompt = _PlacedRows(self._rows), _PlacedRows(prompt_row)
        # what is left of a prompt after whole chunks has smaller programs, of which its length alone chooses
        self.prompt_sizes = sorted({max(1, prefill_chunk // 4), max(1, prefill_chunk // 2), prefill_chunk})
        num_choices = vocab if num_known is None else min(num_known, vocab)
        self._chooser = TokenChooser(max_num_seqs, vocab, num_choices, self._end)
        self._adapters = AdapterRows([]) if adapters is None else adapters
        self._speculation = speculation
        self.drafter: Drafter | None = None
        if speculation is not None:
            speculation.check(model)
            self.drafter = speculation.drafter(max_num_seqs, self.max_model_len, vocab, num_choices)
        self._blank = creation.zeros([max_num_seqs, vocab], "float32")
        self._counts = np.zeros(max_num_seqs, np.int32)
        self._last_chosen = self._counts_on_device = self._none = to_tensor(self._counts)
        self._all_unread = to_tensor(np.full(max_num_seqs, _UNREAD, np.int32))
        self._next_inputs, self._join = to_static(next_inputs), to_static(_insert_row)
        self._copy = to_static(self._copied)
        self._known_prompts: list[_KnownPrompt] = []
        self._round: _Round | None = None
        self._slots: list[_Sequence | None] = [None] * max_num_seqs
        self._in_step = threading.Lock()
        self._waiting: deque[_Sequence] = deque()
        self._sequences: dict[str, _Sequence] = {}
        self._arrivals = 0
        self._totals: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    # requests

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        prompt_logprobs: int | None = None,
        grammar: TokenGrammar | None = None,
        adapter: str | None = None,
        vectors: PromptVectors | None = None,
    ) -> None:
        """Write after a prompt, token ids, from the next step on; n and stop strings are not read.

        prompt_logprobs: tell the log-probabilities of the prompt's tokens, and of so many likeliest ones; the whole
        prompt is then computed. grammar: says which tokens may come, and when the text is whole; it is this request's
        own. adapter: that writes, by name; the model itself if None. vectors: what stands in the prompt in place of
        embeddings. Raises ConfigError for an id in use, for the name of no adapter, for vectors that do not fit, and
        for a prompt that is empty, too long, or not of the vocabulary.
        """
        self._adapters.check(adapter)
        try:
            tokens = [index(token) for token in prompt]
        except TypeError as error:
            raise ConfigError(f"request {request_id!r}: the prompt is no list of token ids: {error}") from None
        if request_id in self._sequences:
            raise ConfigError(f"request {request_id!r} is on its way already; give each an id of its own")
        if not tokens:
            raise ConfigError(f"request {request_id!r}: the prompt has no tokens; give at least one")
        if prompt_logprobs is not None and prompt_logprobs < 0:
            raise ConfigError(f"request {request_id!r}: prompt_logprobs={prompt_logprobs}; give at least 0")
        if grammar is not None and params.min_tokens:
            raise ConfigError(
                f"request {request_id!r}: min_tokens and a grammar may ask for opposites; give one of them"
            )
        params.check_tokens(tokens, self._vocab, f"request {request_id!r}")
        if vectors is not None:
            vectors.check(len(tokens), self._width, f"request {request_id!r}")
        if len(tokens) >= self.max_model_len:
            raise ConfigError(
                f"request {request_id!r}: the prompt has {len(tokens)} tokens, and there are places for "
                f"{self.max_model_len}, the text included; shorten it"
            )
        limit = min(params.max_tokens, self.max_model_len + 1 - len(tokens))  # the last token needs no place
        num_blocks = self._blocks_of(len(tokens) + limit - 1)
        if num_blocks > self._pool.num_blocks:
            raise ConfigError(
                f"request {request_id!r}: {len(tokens)} tokens and {limit} new ones need {num_blocks} blocks of "
                f"{self.block_size}, and there are {self._pool.num_blocks}; ask for fewer, or give more num_blocks"
            )
        keys: list[bytes] = []
        if self.enable_prefix_caching:
            keys = block_keys(tokens, self.block_size, adapter or "", vectors)
        sequence = _Sequence(
            request_id, tokens, params, limit, self._arrivals, keys, prompt_logprobs, grammar, adapter, vectors
        )
        self._arrivals += 1
        self._totals["prompt_tokens"] += len(tokens)
        self._sequences[request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """End a request now; its row and blocks are free. Nothing if there is none of this id."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end_of(sequence, "abort")

    def forget_prefixes(self) -> None:
        """Compute the beginnings of later prompts again; needed when the model's parameters are other ones."""
        self._forget_prompts()
        self._pool.forget()

    @property
    def has_unfinished(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._sequences)

    @property
    def statistics(self) -> EngineStatistics:
        """Counts of the engine."""
        names = (
            "prefix_tokens_queried",
            "prefix_tokens_hit",
            "num_preemptions",
            "prompt_tokens",
            "generated_tokens",
            "draft_tokens",
            "accepted_tokens",
        )
        return EngineStatistics(
            num_running=len(self._sequences) - len(self._waiting),
            num_waiting=len(self._waiting),
            num_blocks_used=self._pool.num_used,
            num_blocks=self._pool.num_blocks,
            finished=dict(self._finished),
            **{name: self._totals[name] for name in names},
        )

    # a step

    def step(self) -> list[StepOutput]:
        """Let requests in, take in a part of one prompt, and make a token of each that runs, or several where drafts
        are met -> what is new. Raises ConfigError while another thread takes a step."""
        if not self._in_step.acquire(blocking=False):
            raise ConfigError(
                "TextEngine.step: another thread is taking a step of this engine; let one thread take them all"
            )
        try:
            return self._step()
        finally:
            self._in_step.release()

    def _step(self) -> list[StepOutput]:
        current = self._round or self._begun()
        self._round = None
        if current is None:
            return []
        if not self._waits_for_host():
            self._round = self._begun()
        return self._read(current)

    def _waits_for_host(self) -> bool:
        """Whether the tokens that are not read yet are to be read before the next round begins."""
        if self.drafter is not None or not READS_LATE[select.backend()]:
            return True
        return any(s.grammar is not None and s.num_unread for s in self._slots if s is not None)

    def _begun(self) -> _Round | None:
        """Give the device the work of the next round; None if there is none."""
        self._forget_prompts(unused=True)
        self._admit()
        work = self._scheduled()
        prompt = work.prefilling
        if not work.decoding and not work.joining and prompt is None:
            return None
        began = time.perf_counter()
        with no_grad():
            self._use_free_rows(work.decoding)
        drafted = time.perf_counter()
        with no_grad():
            joins = [(sequence, known.logits) for sequence, known in work.joining]
            for sequence, known in work.joining:  # before anything is written to blocks that were let go of
                self._copy_rest(known, sequence)
            logits, lengths = self._decoded(work.decoding) if work.decoding else (self._blank, self._none)
            results = logits
            if prompt is not None:
                results = self._prefilled(prompt, work.count)
                joins.append((prompt, results))
            feeds = [feed for feed in work.decoding if feed.is_choosing]
            for sequence, after_prompt in joins:
                if sequence.num_in == sequence.num_tokens:
                    feed = _Feed(sequence, [], [sequence.slot], sequence.num_in, sequence.num_tokens)
                    feeds.append(feed)
                    length, slot = to_tensor(np.int32(feed.num_in)), to_tensor(np.int32(sequence.slot))
                    logits, lengths = self._join(logits, lengths, after_prompt, length, slot)
            choice = self._choose(feeds, logits, lengths) if feeds else None
        is_plain = prompt is None and not work.joining  # of rounds alike, so that what drafts cost can be told
        return _Round(feeds, choice, results, began, drafted, is_plain)

    def _read(self, current: _Round) -> list[StepOutput]:
        """What is new by a round, when the device has done it; of requests that left meanwhile, nothing."""
        for feed in current.feeds:
            feed.sequence.num_unread -= 1
        feeds = [feed for feed in current.feeds if self._sequences.get(feed.sequence.request_id) is feed.sequence]
        if current.choice is None:
            jax.block_until_ready(current.results._array)  # so that no more than two rounds wait on the device
            return []
        chosen = current.choice.read()
        done = time.perf_counter()
        outputs = [self._taken(feed, chosen) for feed in feeds]
        for feed in feeds if current.is_plain else ():
            if feed.sequence.gate is not None:
                since = current.began if feed.drafts else current.drafted
                feed.sequence.gate.note(done - since, len(feed.drafts), feed.num_met)
        return outputs

    def _admit(self) -> None:
        """Give rows to requests, the first that came first, while blocks for what they have are there."""
        while self._waiting and None in self._slots:
            running = len(self._sequences) - len(self._waiting)
            sequence = self._waiting[0]
            if running and self._pool.num_available < self._blocks_of(sequence.num_tokens) + running:
                return
            self._waiting.popleft()
            sequence.slot = self._slots.index(None)
            self._slots[sequence.slot] = sequence
            if self.drafter is not None:
                self.drafter.begin(sequence.slot, sequence.params)
                sequence.gate = sequence.gate or self._speculation.gate()

    def _scheduled(self) -> _RoundWork:
        """The work of the next round, its blocks allocated, earlier requests first."""
        decoding, joining, prefilling, count = [], [], None, 0
        for sequence in sorted((s for s in self._slots if s is not None), key=lambda s: s.arrival):
            if sequence.slot < 0 or sequence.is_whole:
                continue  # preempted for one before it, or about to end
            if not sequence.is_prefilling:
                if self._has_blocks(sequence, sequence.num_in + 1):
                    tokens = sequence.next_tokens[:1]
                    decoding.append(_Feed(sequence, tokens, [sequence.slot], sequence.num_in, sequence.num_tokens))
                continue
            known = next((known for known in self._known_prompts if known.is_of(sequence)), None)
            if known is not None and self._pool.num_available:
                self._share_prompt(known, sequence)
                joining.append((sequence, known))
            elif prefilling is None:
                self._share(sequence)
                count = min(self.prefill_chunk, len(sequence.prompt) - sequence.num_in)
                if self._has_blocks(sequence, sequence.num_in + count):
                    prefilling = sequence
        return _RoundWork(decoding, joining, prefilling, count)

    def _share(self, sequence: _Sequence) -> None:
        """Use the blocks of chunks that are known already, but for the last token, whose logits are needed."""
        chunk, size = self.prefill_chunk, self.block_size
        is_first, sequence.was_started = not sequence.was_started, True
        if is_first and sequence.keys and not sequence.is_scoring:
            self._totals["prefix_tokens_queried"] += len(sequence.prompt)
        while sequence.keys and not sequence.is_scoring and sequence.num_in + chunk < len(sequence.prompt):
            start = sequence.num_in // size
            blocks = self._pool.share(sequence.keys[start : start + chunk // size])
            if blocks is None:
                break
            sequence.blocks += blocks
            sequence.num_in += chunk
            if is_first:
                sequence.num_cached += chunk
                self._totals["prefix_tokens_hit"] += chunk

    def _share_prompt(self, known: _KnownPrompt, sequence: _Sequence) -> None:
        """Use the full blocks of a known prompt, and for what is left of it one more, which there must be."""
        self._pool.give_back(sequence.blocks)
        sequence.blocks = known.blocks[: len(sequence.prompt) // self.block_size]
        self._pool.hold(sequence.blocks)
        if len(sequence.blocks) < len(known.blocks):
            sequence.blocks = [*sequence.blocks, self._pool.take()]
        sequence.num_in = count = len(sequence.prompt)
        if not sequence.was_started:
            sequence.was_started, sequence.num_cached = True, count
            self._totals["prefix_tokens_queried"] += count
            self._totals["prefix_tokens_hit"] += count

    def _forget_prompts(self, *, unused: bool = False) -> None:
        """Let go of known prompts, or of those alone that no request waits for."""
        for known in list(self._known_prompts):
            if not unused or not any(map(known.is_of, self._sequences.values())):
                self._known_prompts.remove(known)
                self._pool.give_back(known.blocks)

    def _has_blocks(self, sequence: _Sequence, num_tokens: int) -> bool:
        """Whether a sequence has the blocks of so many tokens: known prompts, and others that came later, give up
        theirs."""
        wanted = self._blocks_of(num_tokens) - len(sequence.blocks)
        if self._pool.num_available < wanted:
            self._forget_prompts()
        while self._pool.num_available < wanted:
            later = [s for s in self._slots if s is not None and s.blocks and s.arrival >= sequence.arrival]
            victim = max(later, key=lambda s: s.arrival, default=None)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += [self._pool.take() for _ in range(wanted)]
        return True

    def _preempt(self, sequence: _Sequence) -> None:
        self._totals["num_preemptions"] += 1
        self._leave(sequence)
        self._waiting.appendleft(sequence)

    def _leave(self, sequence: _Sequence) -> None:
        """Free the row and the blocks."""
        self._pool.give_back(sequence.blocks)
        self._chooser.leave(sequence.slot)
        if self.drafter is not None:
            self.drafter.leave(sequence.slot)
        self._slots[sequence.slot] = None
        sequence.slot, sequence.blocks, sequence.num_in, sequence.is_choosing = -1, [], 0, False

    def _end_of(self, sequence: _Sequence, reason: str) -> None:
        if sequence.slot >= 0:
            self._leave(sequence)
        else:
            self._waiting.remove(sequence)
        del self._sequences[sequence.request_id]
        self._finished[reason] += 1
        self._forget_prompts(unused=True)

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # rows without a request

    def _use_free_rows(self, feeds: list[_Feed]) -> None:
        """Let them take in what is known of texts that were preempted, then drafts."""
        if self._has_states:
            return  # of one token at a time
        free = deque(slot for slot, sequence in enumerate(self._slots) if sequence is None)
        for feed in feeds:
            known = feed.sequence.next_tokens
            while free and len(feed.tokens) < len(known) and self._has_spare_blocks(feed.sequence, len(feed.rows) + 1):
                feed.tokens.append(known[len(feed.tokens)])
                feed.rows.insert(0, free.popleft())  # the request's own row stays that of the last one
        if self.drafter is None or not free:
            return
        texts, counts = {}, {}
        drafted = [(feed, gate) for feed in feeds if feed.is_choosing and (gate := feed.sequence.gate) is not None]
        left = len(free)
        for number, (feed, gate) in enumerate(drafted):
            sequence = feed.sequence
            room = sequence.limit - len(sequence.completion.token_ids) - 1
            count = min(gate.count, room, -(-left // (len(drafted) - number)))
            if count > 0:
                texts[sequence.slot] = sequence.prompt + sequence.completion.token_ids
                counts[sequence.slot] = count
                left -= count
        drafts = self.drafter.propose(texts, counts) if texts else {}
        for feed, _ in drafted:
            grammar = feed.sequence.grammar and feed.sequence.grammar.copy()
            for token in drafts.get(feed.sequence.slot, ()):
                if grammar is not None and (grammar.is_done or not grammar.allowed()[token]):
                    break
                if not self._has_spare_blocks(feed.sequence, len(feed.rows) + 1):
                    break
                if grammar is not None:
                    grammar.take(token)
                feed.drafts.append(token)
                feed.rows.append(free.popleft())
            self._totals["draft_tokens"] += len(feed.drafts)

    def _has_spare_blocks(self, sequence: _Sequence, count: int) -> bool:
        """Whether a sequence has the blocks of so many tokens more, without others having to give theirs up soon."""
        wanted = self._blocks_of(sequence.num_in + count) - len(sequence.blocks)
        if wanted > 0 and self._pool.num_available < wanted + len(self._sequences) - len(self._waiting):
            return False
        sequence.blocks += [self._pool.take() for _ in range(wanted)]
        return True

    # what is computed

    def _decoded(self, feeds: list[_Feed]) -> tuple[Any, Any]:
        """Logits [max_num_seqs, vocab] after each token that is fed, and how many tokens each row has then; rows of
        others are of nothing."""
        tokens = np.full(self.max_num_seqs, _UNREAD, np.int32)
        counts = np.zeros(self.max_num_seqs, np.int32)
        places = []
        for feed in feeds:
            tokens[feed.rows] = [*feed.tokens, *feed.drafts]
            counts[feed.rows] = 1
            places += [(row, feed.sequence, feed.num_in + number) for number, row in enumerate(feed.rows)]
            feed.sequence.num_in += len(feed.tokens)
        known = self._all_unread if (tokens == _UNREAD).all() else to_tensor(tokens)
        if not np.array_equal(counts, self._counts):
            self._counts, self._counts_on_device = counts, to_tensor(counts)
        self._place(self._placed, places)
        logits = self._decode(self._next_inputs(self._last_chosen, known), self._counts_on_device)
        self._placed.grew(counts)
        return logits, self._rows.lengths

    def _copy_rest(self, known: _KnownPrompt, sequence: _Sequence) -> None:
        """Copy what a known prompt has after its full blocks, where a sequence is to go on."""
        full = len(sequence.prompt) // self.block_size
        if full < len(known.blocks):
            self._copy(*(to_tensor(np.array(blocks[full:][:1])) for blocks in (known.blocks, sequence.blocks)))

    def _copied(self, source: Any, target: Any) -> None:
        for tensor in (tensor for layer in self.cache.layers for tensor in layer.keys_values):
            tensor.scatter_(target, tensor.index_select(source, 0))

    def _prefilled(self, sequence: _Sequence, count: int) -> Any:
        """Take in `count` tokens of a prompt -> logits [1, vocab] if a token of the text is to be chosen by them, else
        what the last block made of them."""
        start = sequence.num_in
        tokens = np.zeros((1, next(size for size in self.prompt_sizes if size >= count)), np.int64)
        tokens[0, :count] = sequence.prompt[start : start + count]
        self._place(self._placed_prompt, [(0, sequence, start)])
        sequence.num_in += count
        of_part = None if sequence.vectors is None else sequence.vectors.part(start, start + count)
        counts = to_tensor(np.array([count], np.int32))
        hidden = self._prefill.hidden(to_tensor(tokens), counts, insert_vectors([of_part], tokens.shape[1]))
        if count == self.prefill_chunk and sequence.keys:
            for number in range(start // self.block_size, sequence.num_in // self.block_size):
                self._pool.name(sequence.blocks[number], sequence.keys[number])
        if sequence.is_scoring:
            self._score(sequence, start, count, hidden)
        if sequence.num_in < sequence.num_tokens:
            return hidden[0]
        logits = self._prefill.finish(counts, hidden)
        self._placed_prompt.grew(np.array([count], np.int32))
        known = _KnownPrompt(sequence, list(sequence.blocks), logits)
        if not self._has_states and any(map(known.is_of, self._sequences.values())):
            self._pool.hold(known.blocks)
            self._known_prompts.append(known)
        return logits

    def _score(self, sequence: _Sequence, start: int, count: int, hidden: tuple[Any, ...]) -> None:
        """Note the log-probabilities of the tokens that follow `count` ones of the prompt from start on."""
        if start == 0:
            sequence.prompt_logprobs, sequence.prompt_top_logprobs = [], []
        logits, most = self._prefill.finish_all(hidden), sequence.num_scored or 0
        following = np.zeros(logits.shape[0], np.int32)
        known = sequence.prompt[start + 1 : start + 1 + count]
        following[: len(known)] = known
        parts = self._chooser.log_probabilities(logits, to_tensor(following), most)
        chosen, top, ids = (part.numpy() for part in parts)
        sequence.prompt_logprobs += chosen[: len(known)].tolist()
        pairs = zip(ids[: len(known), :most].tolist(), top[: len(known), :most].tolist(), strict=True)
        sequence.prompt_top_logprobs += [dict(zip(*pair, strict=True)) for pair in pairs]

    def _place(self, placed: _PlacedRows, sequences: list[tuple[int, _Sequence, int]]) -> None:
        """Say which row goes on with which sequence after so many of its tokens; a row without one has no blocks, so
        that nothing is written."""
        lengths, tables, slots = placed.empty()
        adapters: list[str | None] = [None] * len(lengths)
        for row, sequence, length in sequences:
            lengths[row] = length
            tables[row, : len(sequence.blocks)] = sequence.blocks
            slots[row] = sequence.slot
            adapters[row] = sequence.adapter
        if self._adapters.numbers:
            self._adapters.choose(adapters)
        placed.place(lengths, tables, slots)

    def _choose(self, feeds: list[_Feed], logits: Any, lengths: Any) -> TokenChoice:
        """Choose a token of each by the logits of its row, and after each of its drafts; lengths: of the rows."""
        drafts = []
        for feed in feeds:
            sequence = feed.sequence
            if not sequence.is_choosing:
                tokens = sequence.prompt + sequence.completion.token_ids
                self._chooser.begin(sequence.slot, sequence.params, tokens, len(sequence.prompt), sequence.grammar)
                sequence.is_choosing = True
            for number, row in enumerate(feed.choosing_rows[1:], 1):
                drafts.append(DraftRow(row, sequence.slot, feed.drafts[:number]))
            sequence.num_unread += 1
        choice = self._chooser(logits, lengths, drafts)
        self._last_chosen = choice.token_ids
        return choice

    def _taken(self, feed: _Feed, chosen: ChosenTokens) -> StepOutput:
        """Put into a text what was chosen after its known tokens, and after each draft that was met."""
        sequence, completion = feed.sequence, feed.sequence.completion
        before = len(completion.token_ids)
        output = StepOutput(sequence.request_id, [], num_cached=sequence.num_cached)
        if sequence.is_scoring:
            output.prompt_logprobs = sequence.prompt_logprobs
            output.prompt_top_logprobs = sequence.prompt_top_logprobs
        for row, draft in zip(feed.choosing_rows, [*feed.drafts, None], strict=True):
            if chosen.token_ids[row] < 0:
                completion.finish_reason = "error"
            elif completion.take(chosen, row, sequence.params, self._end, sequence.limit) and sequence.grammar:
                sequence.grammar.take(completion.token_ids[-1])
                if sequence.grammar.is_done:
                    completion.finish_reason = "stop"
            if completion.finish_reason is not None or completion.token_ids[-1] != draft:
                break
            feed.num_met += 1
        sequence.num_in += feed.num_met
        output.token_ids = completion.token_ids[before:]
        output.logprobs, output.top_logprobs = completion.logprobs[before:], completion.top_logprobs[before:]
        output.finish_reason = completion.finish_reason
        self._totals["generated_tokens"] += len(output.token_ids)
        self._totals["accepted_tokens"] += feed.num_met
        if completion.finish_reason is not None:
            self._end_of(sequence, completion.finish_reason)
        elif feed.num_met:
            self._chooser.note(sequence.slot, output.token_ids[1:])
        return output


def _insert_row(logits: Any, lengths: Any, of_one: Any, length: Any, row: Any) -> tuple[Any, Any]:
    """logits [rows, vocab] and lengths [rows] with of_one [1, vocab] and length as a row."""
    is_row = creation.arange(logits.shape[0], dtype="int32") == row
    return is_row.unsqueeze(1).where(of_one, logits), is_row.where(length, lengths)
