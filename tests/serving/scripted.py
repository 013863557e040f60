"""An engine whose texts are known before: it repeats the prompt. A server of it, in a thread."""

import asyncio
import contextlib
import itertools
import threading
import time
from dataclasses import dataclass, field

from polyreme.errors import ConfigError
from polyreme.generation import TextTokenizer
from polyreme.generation.grammar import TextGrammars
from polyreme.models.tokenizer import train_byte_level_bpe
from polyreme.serving.server import Server, ServerOptions, listen
from polyreme.serving.service import ServedModel, ServiceLimits, TextService

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<it>{% endif %}"
)
POISON = "poison"
"""A token whose logits are not finite."""
BROKEN = "broken"
"""A token that makes the engine's step raise."""
REFUSED = "refused"
"""A token that the engine takes no prompt with."""


@dataclass
class ScriptedOutput:
    """What StepOutput is."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached: int = 0
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[dict[int, float]] = field(default_factory=list)


@dataclass
class ScriptedStatistics:
    """What EngineStatistics is."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks_used: int = 1
    num_blocks: int = 4
    prefix_tokens_queried: int = 40
    prefix_tokens_hit: int = 30
    num_preemptions: int = 2
    prompt_tokens: int = 50
    generated_tokens: int = 60
    draft_tokens: int = 9
    accepted_tokens: int = 7


@dataclass
class Script:
    """One request: what comes, and how much of it has."""

    params: object
    tokens: object
    told: list
    written: int = 0


@dataclass
class ScriptedEngine:
    """Has the interface of generation.TextEngine. A text repeats its prompt; the end token in it ends it.

    tokens_a_step: as where drafts are met.
    """

    tokenizer: TextTokenizer
    seconds: float = 0.0
    max_num_seqs: int = 8
    tokens_a_step: int = 1
    live: dict = field(default_factory=dict)
    aborted: list = field(default_factory=list)
    steps: int = 0

    @property
    def has_unfinished(self):
        return bool(self.live)

    @property
    def statistics(self):
        running = min(len(self.live), self.max_num_seqs)
        return ScriptedStatistics(running, len(self.live) - running)

    def add(self, request_id, prompt, params, prompt_logprobs=None, grammar=None, adapter=None, vectors=None):
        if REFUSED in self.tokenizer.decode(prompt):
            raise ConfigError("the engine takes no such prompt")
        told = [] if prompt_logprobs is None else [-float(i) for i in range(1, len(prompt))]
        self.live[request_id] = Script(params, itertools.cycle(prompt), told)

    def abort(self, request_id):
        if self.live.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def step(self):
        time.sleep(self.seconds)
        self.steps += 1
        outputs = []
        for request_id, script in list(self.live.items())[: self.max_num_seqs]:
            token = next(script.tokens)
            if self.tokenizer.decode([token]) == BROKEN:
                raise RuntimeError("the engine broke")
            params = script.params
            tells = params.logprobs is not None
            if self.tokenizer.decode([token]) == POISON:
                outputs.append(ScriptedOutput(request_id, [], finish_reason="error"))
            elif token in self.tokenizer.end and not params.ignore_eos and script.written >= params.min_tokens:
                outputs.append(ScriptedOutput(request_id, [], [], [], "stop"))
            else:
                count = min(self.tokens_a_step, params.max_tokens - script.written)
                tokens = [token, *itertools.islice(script.tokens, count - 1)]
                script.written += count
                ends = script.written == params.max_tokens
                outputs.append(
                    ScriptedOutput(
                        request_id,
                        tokens,
                        [-0.5] * count * tells,
                        [{token: -0.5, 1: -float("inf")} for token in tokens] * tells,
                        "length" if ends else None,
                        num_cached=4,
                    )
                )
            outputs[-1].prompt_logprobs, script.told = script.told, []
            outputs[-1].prompt_top_logprobs = [{token: value} for value in outputs[-1].prompt_logprobs]
            if outputs[-1].finish_reason:
                del self.live[request_id]
        return outputs


def tokenizer_of(words="to be or not to be, that is the question", template=TEMPLATE):
    """Byte-level, so that it knows any text; poison is a token."""
    tokenizer = train_byte_level_bpe(iter([words]), 280)
    tokenizer.add_tokens([POISON, BROKEN, REFUSED])
    return TextTokenizer(tokenizer, [tokenizer.token_to_id("<|endoftext|>")], template=template)


class ServedThread:
    """A server in a thread, on a port of its own."""

    def __init__(self, model, limits=None, names=("nano", "second"), **options):
        self.options = ServerOptions(names, port=0, limits=limits or ServiceLimits(), **options)
        self.listener = listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = model
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.is_up = threading.Event()

    async def _run(self):
        self.service = TextService(self.options.names, self.options.limits, self.options.adapters)
        self.server = Server(self.service, self.options)
        self.endpoints = self.server.endpoints
        if self.model is not None:
            self.service.start(self.model)
        self.loop = asyncio.get_running_loop()
        self.loop.call_soon(self.is_up.set)
        await self.server.serve(sockets=[self.listener])
        self.service.close()

    def __enter__(self):
        self.thread.start()
        self.is_up.wait(10)
        return self

    def __exit__(self, *_):
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(20)
        with contextlib.suppress(OSError):
            self.listener.close()


def wait_until(is_so, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_so()


def scripted_model(seconds=0.0, max_model_len=64, max_num_seqs=8, **options):
    tokenizer = tokenizer_of(**options)
    grammars = TextGrammars(tokenizer, tokenizer.vocab_size)
    return ServedModel(ScriptedEngine(tokenizer, seconds, max_num_seqs), tokenizer, max_model_len, grammars)
