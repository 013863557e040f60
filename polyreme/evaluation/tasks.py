"""Tasks: text whose tokens a model predicts, choices it weighs, answers it writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from polyreme.data.chat_rows import ChatRow, read_rows
from polyreme.data.documents import DocumentForm, holds_rows, read_blocks
from polyreme.data.record_files import Record, read_records
from polyreme.data.text_files import BadLines
from polyreme.errors import ConfigError, DataError
from polyreme.evaluation.metrics import chrf, is_exact, rouge_l
from polyreme.evaluation.scorer import Scorer
from polyreme.generation.sampling import SamplingParams
from polyreme.registry import Registry
from polyreme.version import full_version

_SHIPPED = Path(__file__).parent / "kjv"


@dataclass(frozen=True)
class EvalOptions:
    """Settings of tasks.

    limit: rows of a task, or windows of perplexity, at most. max_length: tokens of a window, the model's if None.
    stride: tokens that each window but the first scores, half a window if None. num_fewshot: rows that are shown with
    their answers before each one, drawn from the others by seed. chat: by the chat template. add_bos: whether the token
    that begins a text stands before plain text, as the tokenizer has it if None; of a chat the template alone says.
    max_new_tokens, stop: of written answers.
    """

    limit: int | None = None
    max_length: int | None = None
    stride: int | None = None
    num_fewshot: int = 0
    seed: int = 0
    chat: bool = False
    add_bos: bool | None = None
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("limit", "max_length", "stride", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}; give at least 1")
        if self.num_fewshot < 0 or self.seed < 0:
            raise ConfigError(f"num_fewshot={self.num_fewshot}, seed={self.seed}; give at least 0")


@dataclass(frozen=True)
class TaskResult:
    """The result of a task: metrics by name, the number of samples, and the settings that the numbers depend on."""

    task: str
    metrics: dict[str, float]
    num_samples: int
    depends_on: dict[str, Any]

    def as_row(self) -> dict[str, Any]:
        """One flat object for a file of results."""
        return {"task": self.task, **self.metrics, "num_samples": self.num_samples, **self.depends_on}


class TaskOutcome(NamedTuple):
    """The outcome of running a task: metrics, samples, ids of the first prompt, and the options as they came out."""

    metrics: dict[str, float]
    num_samples: int
    first_prompt: list[int]
    options: EvalOptions


Run = Callable[[Scorer, EvalOptions, Sequence[Path]], TaskOutcome]
"""(model, options, files) -> what came of it."""


@dataclass(frozen=True, slots=True)
class EvalTask:
    """A task by name. reads: the kind of its files, of _KINDS. files: shipped ones, which --data does not name."""

    name: str
    about: str
    run: Run
    reads: str = "rows"
    files: tuple[Path, ...] = ()
    aliases: tuple[str, ...] = ()

    def __call__(self, scorer: Scorer, options: EvalOptions, data: Sequence[Path]) -> TaskResult:
        """The result on the files of data that are of its kind, or on its own."""
        paths = self.files or tuple(path for path in data if self.takes(path))
        if not paths:
            raise ConfigError(f"task {self.name} needs --data FILE of {_KINDS[self.reads]}: {self.about}")
        metrics, count, first, options = self.run(scorer, options, paths)
        facts = scorer.facts() | {"polyreme": full_version, "data": {path.name: _digest(path) for path in paths}}
        bos = scorer.token_id("bos_token")
        options = replace(options, add_bos=bool(first) and first[0] == bos)
        return TaskResult(self.name, metrics, count, facts | asdict(options) | {"first_prompt": scorer.decode(first)})

    def takes(self, path: Path) -> bool:
        """Whether a file of --data is of the kind that the task reads. Raises DataError for one that is missing or
        damaged."""
        return not self.files and _kind_of(path) == self.reads


_KINDS = {
    "text": "text (.txt, .txt.gz)",
    "choices": "rows with choices (.jsonl, .json, .parquet)",
    "rows": "rows (.jsonl, .json, .parquet)",
}
"""What files hold, by the kinds that tasks read."""


def _kind_of(path: Path) -> str:
    if not holds_rows(path):
        return "text"
    first = next(read_records(path, BadLines()), None)
    return "choices" if first is not None and "choices" in first.fields else "rows"


def _digest(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def beginning(scorer: Scorer, add_bos: bool | None) -> list[int]:
    """Ids that stand before plain text. Raises ConfigError for a token that the tokenizer has not."""
    if add_bos is None:
        plain, whole = scorer.encode("a"), scorer.encode("a", add_special_tokens=True)
        return whole[: whole.index(plain[0])] if plain and plain[0] in whole else []
    if not add_bos:
        return []
    bos = scorer.token_id("bos_token")
    if bos is None:
        raise ConfigError("--add-bos: the tokenizer names no bos_token; leave it out")
    return [bos]


# perplexity


def windows(count: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first token scored) of windows over count tokens: each but the first scores stride tokens at its
    end, after length - stride that are known.

    >>> list(windows(10, 6, 2))
    [(0, 6, 1), (2, 8, 6), (4, 10, 8)]
    """
    begin, scored = 0, 1
    while scored < count:
        end = min(begin + length, count)
        yield begin, end, scored
        begin, scored = begin + stride, end


_CHARS_A_TOKEN = 32
"""More than tokens of any text have on average."""


def _perplexity(scorer: Scorer, options: EvalOptions, paths: Sequence[Path]) -> TaskOutcome:
    prefix = beginning(scorer, options.add_bos)
    length = options.max_length or scorer.max_tokens
    if length > scorer.max_tokens:
        raise ConfigError(
            f"max_length={length}: the model scores windows of at most {scorer.max_tokens} tokens, its positions but "
            "one; give at most so many"
        )
    stride = options.stride or max(length // 2, 1)
    if stride >= length:
        raise ConfigError(f"stride={stride} in windows of {length} tokens leaves none that are known; give less")
    parts: list[tuple[list[int], int]] = []  # ids of a window, the first one scored
    first: list[int] = []
    most = None if options.limit is None else _CHARS_A_TOKEN * (length + stride * options.limit)
    for text in _texts(paths):
        text = text[:most]  # of a long text the beginning alone is asked for, and may be sent
        ids = [*prefix, *scorer.encode(text)]
        first = first or ids[:length]
        parts += [(ids[begin:end], scored - begin) for begin, end, scored in windows(len(ids), length, stride)]
    parts = parts[: options.limit]
    if not parts:
        raise DataError(f"{', '.join(map(str, paths))}: not one token that follows another; give more text")
    scored = scorer.score([ids for ids, _ in parts])
    logprobs = np.concatenate([s.logprobs[start - 1 :] for s, (_, start) in zip(scored, parts, strict=True)])
    nbytes = len("".join(scorer.decode(ids[start:]) for ids, start in parts).encode())
    nats = float(-logprobs.mean())
    metrics = {"nats_per_token": nats, "perplexity": math.exp(min(nats, 700.0))}
    metrics["bits_per_byte"] = float(-logprobs.sum()) / math.log(2) / nbytes
    metrics["num_tokens"] = len(logprobs)
    return TaskOutcome(metrics, len(parts), first, replace(options, max_length=length, stride=stride))


def _texts(paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        # a whole file is one document
        pieces = [text for block in read_blocks(path, DocumentForm(), BadLines()) for text in block.texts()[0]]
        yield "".join(pieces)


# choices


@dataclass(frozen=True)
class ChoiceRow:
    """A prompt with several ways on, of which one, choices[answer], is right."""

    prompt: str
    choices: tuple[str, ...]
    answer: int

    @property
    def answered(self) -> str:
        """The prompt with what is right."""
        return f"{self.prompt} {self.choices[self.answer]}"


def read_choices(record: Record) -> ChoiceRow:
    """A row {"prompt", "choices", "answer"}; answer is the number of the choice from 0, or the choice. Raises DataError
    with place and field."""
    fields, place = record.fields, record.place
    prompt, choices, answer = (fields.get(name) for name in ("prompt", "choices", "answer"))
    if not isinstance(prompt, str):
        raise DataError(f"{place}: prompt: {type(prompt).__name__} where a text is expected")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise DataError(f"{place}: choices: two texts or more are expected")
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise DataError(f"{place}: answer: {answer!r} is no choice; give its number, 0 to {len(choices) - 1}")
    return ChoiceRow(prompt, tuple(choices), answer)


def encode_pair(scorer: Scorer, prefix: Sequence[int], context: str, continuation: str) -> tuple[list[int], list[int]]:
    """(ids before, ids of the continuation) of a text: white space at the context's end is of the continuation."""
    body = context.rstrip()
    context, continuation = body, context[len(body) :] + continuation
    before = [*prefix, *scorer.encode(context)]
    return before, [*prefix, *scorer.encode(context + continuation)][len(before) :]


def _choose(scorer: Scorer, options: EvalOptions, paths: Sequence[Path]) -> TaskOutcome:
    rows = [read_choices(record) for path in paths for record in read_records(path, BadLines())]
    asked = rows[: options.limit]
    if not asked:
        raise DataError(f"{', '.join(map(str, paths))}: no rows; give a file that has some")
    prefix = [] if options.chat else beginning(scorer, options.add_bos)
    pairs = []
    for number, row in enumerate(asked):
        shown = _examples_for(rows, number, options)
        for choice in row.choices:
            if options.chat:
                messages = [message for one in shown for message in _as_turns(one.prompt, one.choices[one.answer])]
                before = scorer.encode_chat([*messages, {"role": "user", "content": row.prompt}])
                pairs.append((before, scorer.encode(choice)))
            else:
                context = "\n\n".join([*(one.answered for one in shown), row.prompt])
                pairs.append(encode_pair(scorer, prefix, context, f" {choice}"))
    sums = [value for value, _ in score_pairs(scorer, pairs)]
    right, right_normalized, begin = [], [], 0
    for row in asked:
        own = np.array(sums[begin : begin + len(row.choices)])
        begin += len(row.choices)
        right.append(int(own.argmax()) == row.answer)
        right_normalized.append(int((own / [len(choice) for choice in row.choices]).argmax()) == row.answer)
    metrics = _share("acc", right) | _share("acc_norm", right_normalized)
    return TaskOutcome(metrics, len(asked), pairs[0][0], options)


def score_pairs(scorer: Scorer, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
    """For each (ids before, ids of the continuation) its log-probability, and whether each token was the likeliest.

    What is too long loses tokens at its beginning. Raises DataError for a continuation without a token, and one that
    nothing is before.
    """
    texts = []
    for before, continuation in pairs:
        if not continuation or not before:
            what = "a continuation has no tokens" if before else "nothing is before a continuation; set --add-bos"
            raise DataError(f"{what}: {scorer.decode([*before, *continuation])!r}")
        if len(continuation) >= scorer.max_tokens:
            raise DataError(f"a continuation has {len(continuation)} tokens, and the model takes {scorer.max_tokens}")
        texts.append([*before, *continuation][-scorer.max_tokens :])
    scored = scorer.score(texts)
    counts = [len(continuation) for _, continuation in pairs]
    return [
        (float(one.logprobs[-count:].sum()), bool(one.is_likeliest[-count:].all()))
        for one, count in zip(scored, counts, strict=True)
    ]


def _examples_for(rows: Sequence[Any], number: int, options: EvalOptions) -> list[Any]:
    """Rows that are shown with their answers before one."""
    if not options.num_fewshot:
        return []
    if options.num_fewshot >= len(rows):
        raise ConfigError(f"num_fewshot={options.num_fewshot} of {len(rows)} rows; give less, or more rows")
    others = [i for i in range(len(rows)) if i != number]
    chosen = np.random.default_rng([options.seed, number]).choice(others, options.num_fewshot, replace=False)
    return [rows[i] for i in chosen]


def _as_turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _share(name: str, right: Sequence[bool]) -> dict[str, float]:
    """The part that is right, and the standard error of that."""
    share = float(np.mean(right))
    error = math.sqrt(share * (1 - share) / (len(right) - 1)) if len(right) > 1 else math.nan
    return {name: share, f"{name}_stderr": error}


# written answers


def _write(scorer: Scorer, options: EvalOptions, paths: Sequence[Path]) -> TaskOutcome:
    rows = read_rows(paths)
    asked = rows[: options.limit]
    prefix = [] if options.chat else beginning(scorer, options.add_bos)
    prompts = []
    for number, row in enumerate(asked):
        shown = _examples_for(rows, number, options)
        if options.chat:
            messages = [message for one in shown for message in one.messages]
            prompts.append(scorer.encode_chat([*messages, *row.messages[:-1]]))
        else:
            context = "\n\n".join([*(_plain(one, whole=True) for one in shown), _plain(row, whole=False)])
            prompts.append([*prefix, *scorer.encode(context)])
    params = SamplingParams(temperature=0, max_tokens=options.max_new_tokens, seed=options.seed, stop=options.stop)
    texts = scorer.write(prompts, params)
    references = [[row.messages[-1]["content"]] for row in asked]
    pairs = list(zip(texts, references, strict=True))
    metrics = _share("exact_match", [is_exact(*pair) for pair in pairs])
    metrics["rouge_l"] = float(np.mean([rouge_l(*pair) for pair in pairs]))
    value = chrf(texts, references)
    return TaskOutcome(metrics | ({} if value is None else {"chrf": value}), len(asked), prompts[0], options)


def _plain(row: ChatRow, *, whole: bool) -> str:
    return "\n".join(message["content"] for message in (row.messages if whole else row.messages[:-1]))


TASKS: Registry[EvalTask] = Registry(
    "task",
    [
        EvalTask("ppl", "the mean cost of a token of text", _perplexity, "text", aliases=("perplexity",)),
        EvalTask(
            "choice", 'rows {"prompt", "choices", "answer"}, of which the likeliest choice counts', _choose, "choices"
        ),
        EvalTask("generate", "rows as for fine-tuning, whose last answer is written and compared", _write),
        EvalTask("kjv_cloze", "verses whose last word is one of four", _choose, files=(_SHIPPED / "cloze.jsonl",)),
        EvalTask("kjv_order", "verses which one of four follows", _choose, files=(_SHIPPED / "order.jsonl",)),
    ],
)
"""Tasks by the name that --tasks has for them."""
