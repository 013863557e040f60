"""Continuous batching: requests join and leave between steps, and share the blocks of one cache."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

import numpy as np

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.generation.block_pool import BlockPool, block_keys
from polyreme.generation.blockwise import BlockwiseSteps
from polyreme.generation.choosing import Completion, DraftRow, TokenChooser, TokenGrammar
from polyreme.generation.sampling import SamplingParams
from polyreme.generation.speculation import Drafter, DraftGate, Speculation
from polyreme.jit import to_static
from polyreme.models.parts.cache import PagedCache, PagedRows
from polyreme.nn.layers.lora_rows import AdapterRows
from polyreme.ops import creation

_ROOM_A_SEQUENCE = 2048
"""Tokens of each sequence that the cache has blocks for where num_blocks does not say; fewer if they cannot be more."""


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
    """A request on its way. keys: of its prompt's full blocks. num_in: its tokens that are in the cache. num_scored: so
    many of the likeliest tokens are told of at each place of the prompt. adapter: that writes it, None for the model
    itself."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    limit: int
    arrival: int
    keys: list[bytes]
    num_scored: int | None = None
    grammar: TokenGrammar | None = None
    adapter: str | None = None
    completion: Completion = field(default_factory=Completion)
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    num_in: int = 0
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
        return len(self.prompt) + len(self.completion.token_ids)

    @property
    def next_tokens(self) -> list[int]:
        """The tokens after those that are in the cache, of a prompt that is in."""
        return self.completion.token_ids[self.num_in - len(self.prompt) :]


@dataclass
class _Feed:
    """Tokens of a sequence that a step decodes, and the row of each: known ones, then drafts."""

    sequence: _Sequence
    tokens: list[int]
    rows: list[int]
    drafts: list[int] = field(default_factory=list)
    num_met: int = 0

    @property
    def is_choosing(self) -> bool:
        """Whether tokens are chosen after these: all that is known is then among them."""
        return self.sequence.num_in + len(self.tokens) == self.sequence.num_tokens

    @property
    def choosing_rows(self) -> list[int]:
        """The rows after which a token is chosen: that of the last known token, then those of the drafts."""
        return self.rows[len(self.tokens) - 1 :] if self.is_choosing else []


@dataclass(frozen=True)
class _Round:
    """The work of a step: tokens of each sequence that decodes, and a part of one prompt."""

    decoding: list[_Feed]
    prefilling: _Sequence | None
    count: int = 0


class TextEngine:
    """Writes for many requests at once with a Decoder, which is put into evaluation mode.

    A step takes in a part of one prompt and makes a token of every request that runs. Prompts are taken in by chunks of
    prefill_chunk tokens, always at the same places, and all max_num_seqs rows are decoded by one program whether they
    are in use or not, so that the tokens and log-probabilities of a request are the same bits alone, in any batch,
    after a prefix that was known, and after a preemption.

    Keys and values are in num_blocks blocks of block_size tokens. Full chunks of prompts are kept while no other needs
    the blocks, for prompts that begin the same (enable_prefix_caching). Where blocks run out the request that came last
    gives its own back, and is taken in again later: its prompt by chunks, its text by the decoding program, as before.
    prompt_sizes: tokens of the programs that take in prompts.

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
        enable_prefix_caching: bool = True,
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
        self.max_num_seqs, self.enable_prefix_caching = max_num_seqs, enable_prefix_caching
        self._vocab, self._end = vocab, tuple(end)
        self._pool = BlockPool(total_blocks)
        self.cache = PagedCache(model, total_blocks, block_size, kv_cache_dtype)
        self._rows = self.cache.rows(max_num_seqs, self.max_model_len)
        self._prompt_row = self.cache.rows(1, self.max_model_len)
        self._decode = BlockwiseSteps(model, self._rows, is_first=False)
        self._prefill = BlockwiseSteps(model, self._prompt_row, is_first=False)
        # what is left of a prompt after whole chunks has smaller programs, of which its length alone chooses
        self.prompt_sizes = sorted({max(1, prefill_chunk // 4), max(1, prefill_chunk // 2), prefill_chunk})
        num_choices = vocab if num_known is None else min(num_known, vocab)
        self._chooser = TokenChooser(max_num_seqs, vocab, num_choices, self._end)
        self._adapters = AdapterRows([]) if adapters is None else adapters
        self._speculation = speculation
        self.drafter: Drafter | None = None
        if speculation is not None:
            self.drafter = speculation.drafter(max_num_seqs, self.max_model_len, vocab, num_choices)
        self._blank = creation.zeros([max_num_seqs, vocab], "float32")
        self._one_each = to_tensor(np.ones(max_num_seqs, np.int32))
        self._join = to_static(_insert_row)
        self._slots: list[_Sequence | None] = [None] * max_num_seqs
        self._in_step = threading.Lock()
        self._waiting: deque[_Sequence] = deque()
        self._sequences: dict[str, _Sequence] = {}
        self._arrivals = 0
        self._counts: Counter[str] = Counter()
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
    ) -> None:
        """Write after a prompt, token ids, from the next step on; n and stop strings are not read.

        prompt_logprobs: tell the log-probabilities of the prompt's tokens, and of so many likeliest ones; the whole
        prompt is then computed. grammar: says which tokens may come, and when the text is whole; it is this request's
        own. adapter: that writes, by name; the model itself if None. Raises ConfigError for an id in use, for the name
        of no adapter, and for a prompt that is empty, too long, or not of the vocabulary.
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
        keys = block_keys(tokens, self.block_size, adapter or "") if self.enable_prefix_caching else []
        sequence = _Sequence(request_id, tokens, params, limit, self._arrivals, keys, prompt_logprobs, grammar, adapter)
        self._arrivals += 1
        self._counts["prompt_tokens"] += len(tokens)
        self._sequences[request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """End a request now; its row and blocks are free. Nothing if there is none of this id."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end_of(sequence, "abort")

    def forget_prefixes(self) -> None:
        """Compute the beginnings of later prompts again; needed when the model's parameters are other ones."""
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
            **{name: self._counts[name] for name in names},
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
        self._admit()
        work = self._scheduled()
        began = time.perf_counter()
        with no_grad():
            self._use_free_rows(work.decoding)
        drafted = time.perf_counter()
        with no_grad():
            logits = self._decoded(work.decoding) if work.decoding else self._blank
            choosing = [feed for feed in work.decoding if feed.is_choosing]
            for feed in work.decoding:
                if not feed.is_choosing:
                    feed.sequence.num_in += len(feed.tokens)
            prompt = work.prefilling
            if prompt is not None:
                after_prompt = self._prefilled(prompt, work.count)
                if after_prompt is not None:
                    logits = self._join(logits, after_prompt, to_tensor(np.int32(prompt.slot)))
                    choosing.append(_Feed(prompt, [], [prompt.slot]))
            outputs = self._chosen(choosing, logits) if choosing else []
        if prompt is None:  # of steps alike, so that what drafts cost can be told
            done = time.perf_counter()
            for feed in choosing:
                if feed.sequence.gate is not None:
                    since = began if feed.drafts else drafted
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

    def _scheduled(self) -> _Round:
        """The work of the next step, its blocks allocated, earlier requests first."""
        decoding, prefilling, count = [], None, 0
        for sequence in sorted((s for s in self._slots if s is not None), key=lambda s: s.arrival):
            if sequence.slot < 0:
                continue  # preempted for one before it
            if not sequence.is_prefilling:
                if self._has_blocks(sequence, sequence.num_in + 1):
                    decoding.append(_Feed(sequence, sequence.next_tokens[:1], [sequence.slot]))
            elif prefilling is None:
                self._share(sequence)
                count = min(self.prefill_chunk, len(sequence.prompt) - sequence.num_in)
                if self._has_blocks(sequence, sequence.num_in + count):
                    prefilling = sequence
        return _Round(decoding, prefilling, count)

    def _share(self, sequence: _Sequence) -> None:
        """Use the blocks of chunks that are known already, but for the last token, whose logits are needed."""
        chunk, size = self.prefill_chunk, self.block_size
        is_first, sequence.was_started = not sequence.was_started, True
        if is_first and sequence.keys and not sequence.is_scoring:
            self._counts["prefix_tokens_queried"] += len(sequence.prompt)
        while sequence.keys and not sequence.is_scoring and sequence.num_in + chunk < len(sequence.prompt):
            start = sequence.num_in // size
            blocks = self._pool.share(sequence.keys[start : start + chunk // size])
            if blocks is None:
                break
            sequence.blocks += blocks
            sequence.num_in += chunk
            if is_first:
                sequence.num_cached += chunk
                self._counts["prefix_tokens_hit"] += chunk

    def _has_blocks(self, sequence: _Sequence, num_tokens: int) -> bool:
        """Whether a sequence has the blocks of so many tokens: others that came later give up theirs."""
        wanted = self._blocks_of(num_tokens) - len(sequence.blocks)
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
        self._counts["num_preemptions"] += 1
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

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # rows without a request

    def _use_free_rows(self, feeds: list[_Feed]) -> None:
        """Let them take in what is known of texts that were preempted, then drafts."""
        free = deque(slot for slot, sequence in enumerate(self._slots) if sequence is None)
        for feed in feeds:
            known = feed.sequence.next_tokens
            while free and len(feed.tokens) < len(known) and self._has_spare_blocks(feed.sequence, len(feed.rows) + 1):
                feed.tokens.append(known[len(feed.tokens)])
                feed.rows.insert(0, free.popleft())  # the request's own row stays that of the last one
        if self.drafter is None or not free:
            return
        texts, counts = {}, {}
        drafted = [feed for feed in feeds if feed.is_choosing and feed.sequence.gate is not None]
        left = len(free)
        for number, feed in enumerate(drafted):
            sequence = feed.sequence
            room = sequence.limit - len(sequence.completion.token_ids) - 1
            count = min(sequence.gate.count, room, -(-left // (len(drafted) - number)))
            if count > 0:
                texts[sequence.slot] = sequence.prompt + sequence.completion.token_ids
                counts[sequence.slot] = count
                left -= count
        drafts = self.drafter.propose(texts, counts) if texts else {}
        for feed in drafted:
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
            self._counts["draft_tokens"] += len(feed.drafts)

    def _has_spare_blocks(self, sequence: _Sequence, count: int) -> bool:
        """Whether a sequence has the blocks of so many tokens more, without others having to give theirs up soon."""
        wanted = self._blocks_of(sequence.num_in + count) - len(sequence.blocks)
        if wanted > 0 and self._pool.num_available < wanted + len(self._sequences) - len(self._waiting):
            return False
        sequence.blocks += [self._pool.take() for _ in range(wanted)]
        return True

    # what is computed

    def _decoded(self, feeds: list[_Feed]) -> Any:
        """Logits [max_num_seqs, vocab] after each token that is fed; rows of others are of nothing."""
        tokens = np.zeros((self.max_num_seqs, 1), np.int64)
        places = []
        for feed in feeds:
            tokens[feed.rows, 0] = [*feed.tokens, *feed.drafts]
            places += [(row, feed.sequence, number) for number, row in enumerate(feed.rows)]
        self._place(self._rows, places)
        return self._decode(to_tensor(tokens), self._one_each)

    def _prefilled(self, sequence: _Sequence, count: int) -> Any:
        """Take in `count` tokens of a prompt -> logits [1, vocab] if a token of the text is to be chosen by them."""
        start = sequence.num_in
        tokens = np.zeros((1, next(size for size in self.prompt_sizes if size >= count)), np.int64)
        tokens[0, :count] = sequence.prompt[start : start + count]
        self._place(self._prompt_row, [(0, sequence, 0)])
        sequence.num_in += count
        hidden = self._prefill.hidden(to_tensor(tokens))
        if count == self.prefill_chunk and sequence.keys:
            for number in range(start // self.block_size, sequence.num_in // self.block_size):
                self._pool.name(sequence.blocks[number], sequence.keys[number])
        if sequence.is_scoring:
            self._score(sequence, start, count, hidden)
        if sequence.num_in < sequence.num_tokens:
            return None
        return self._prefill.finish(to_tensor(np.array([count], np.int32)), hidden)

    def _score(self, sequence: _Sequence, start: int, count: int, hidden: tuple[Any, ...]) -> None:
        """Note the log-probabilities of the tokens that follow `count` ones of the prompt from start on."""
        if start == 0:
            sequence.prompt_logprobs, sequence.prompt_top_logprobs = [], []
        logits, most = self._prefill.finish_all(hidden), sequence.num_scored or 0
        following = np.zeros(logits.shape[0], np.int32)
        known = sequence.prompt[start + 1 : start + 1 + count]
        following[: len(known)] = known
        chosen, top, ids = self._chooser.log_probabilities(logits, to_tensor(following), most)
        sequence.prompt_logprobs += chosen[: len(known)].tolist()
        pairs = zip(ids[: len(known), :most].tolist(), top[: len(known), :most].tolist(), strict=True)
        sequence.prompt_top_logprobs += [dict(zip(*pair, strict=True)) for pair in pairs]

    def _place(self, rows: PagedRows, sequences: list[tuple[int, _Sequence, int]]) -> None:
        """Say which row goes on with which sequence, so many tokens after those that are in; a row without one has no
        blocks, so that nothing is written."""
        lengths = np.zeros(rows.lengths.shape, np.int32)
        tables = np.full(rows.block_tables.shape, -1, np.int32)
        adapters: list[str | None] = [None] * len(lengths)
        for row, sequence, offset in sequences:
            lengths[row] = sequence.num_in + offset
            tables[row, : len(sequence.blocks)] = sequence.blocks
            adapters[row] = sequence.adapter
        if self._adapters.numbers:
            self._adapters.choose(adapters)
        rows.lengths.set_value(lengths)
        rows.block_tables.set_value(tables)

    def _chosen(self, feeds: list[_Feed], logits: Any) -> list[StepOutput]:
        """Choose a token of each by the logits of its row, and after each of its drafts -> what is new."""
        lengths = np.zeros(self.max_num_seqs, np.int32)
        drafts = []
        for feed in feeds:
            sequence = feed.sequence
            if not sequence.is_choosing:
                tokens = sequence.prompt + sequence.completion.token_ids
                self._chooser.begin(sequence.slot, sequence.params, tokens, len(sequence.prompt), sequence.grammar)
                sequence.is_choosing = True
            for number, row in enumerate(feed.choosing_rows):
                lengths[row] = sequence.num_in + len(feed.tokens) + number
                if number:
                    drafts.append(DraftRow(row, sequence.slot, feed.drafts[:number]))
        chosen = self._chooser(logits, to_tensor(lengths), drafts)
        return [self._taken(feed, chosen) for feed in feeds]

    def _taken(self, feed: _Feed, chosen: Any) -> StepOutput:
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
        sequence.num_in += len(feed.tokens) + feed.num_met
        output.token_ids = completion.token_ids[before:]
        output.logprobs, output.top_logprobs = completion.logprobs[before:], completion.top_logprobs[before:]
        output.finish_reason = completion.finish_reason
        self._counts["generated_tokens"] += len(output.token_ids)
        self._counts["accepted_tokens"] += feed.num_met
        if completion.finish_reason is not None:
            self._end_of(sequence, completion.finish_reason)
        elif feed.num_met:
            self._chooser.note(sequence.slot, output.token_ids[1:])
        return output


def _insert_row(logits: Any, of_one: Any, row: Any) -> Any:
    """logits [rows, vocab] with of_one [1, vocab] as a row."""
    is_row = creation.arange(logits.shape[0], dtype="int32").unsqueeze(1) == row
    return is_row.where(of_one, logits)
