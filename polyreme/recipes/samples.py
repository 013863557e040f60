"""Kinds of samples that models are trained on, as records: what a run asks of its data without knowing what it is.

A new kind is a file beside this one and a record in SAMPLES, whose name a family's record has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from polyreme.data.masking import num_asked
from polyreme.registry import Reference, Registry


class Input(NamedTuple):
    """One array of a batch: its shape, the batch first, and its dtype."""

    shape: tuple[int, ...]
    dtype: Any


Loader = Callable[..., Any]
"""(RunConfig, folder that relative paths are looked for in) -> the data: train and validation, which have a length
and give a sample's arrays by its number (what the model takes, then its labels); sampler, which makes the order they
are read in; digest, which a resumed run compares;
summary, how much it is; shown(number, marks), a training sample as text, with marks around what counts of it where not
all does; tokenizer, or None."""

Drawer = Callable[..., tuple[Any, ...]]
"""(RunConfig, steps) -> for each step the arrays of a whole batch, made up."""

Checker = Callable[..., None]
"""(Batch, ModelConfig, which batch it is) -> raises DataError for a sample that the model cannot take."""


Sampler = Callable[..., str]
"""(data, model, RunConfig, tokens -> logits, None where the model can be called) -> what it writes after a prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleKind:
    """One kind of samples. settings: keys of data: that it alone has a use for. tokens: how many tokens a sample counts
    as, given the model's configuration. arrays: of a global batch, given the run's configuration, the labels last.
    is_counted: whether labels may be data.packing.NO_LABEL, which the loss leaves out, given the same. sample: what
    shows the model trained on them, None for none; is_shown_before: also before training."""

    name: str
    settings: tuple[str, ...]
    tokens: Callable[[Any], int]
    arrays: Callable[[Any], tuple[Input, ...]]
    load: Reference[Loader]
    draw: Reference[Drawer]
    check: Reference[Checker]
    is_counted: Callable[[Any], bool] = lambda config: False
    sample: Reference[Sampler] | None = None
    is_shown_before: bool = False
    aliases: tuple[str, ...] = ()


def labels_of(arrays: Sequence[Any]) -> Any:
    """The labels a model takes, given a sample's arrays but the first: the array itself where it is one.

    >>> labels_of([1]), labels_of([1, 2])
    (1, (1, 2))
    """
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def _rows_of_tokens(config: Any) -> tuple[Input, ...]:
    """Rows of tokens, where documents share them also where each lies, and the token that follows each."""
    rows = (config.train.global_batch,)
    seq_len = config.dimensions.seq_len
    inputs = (*rows, 3, seq_len) if config.is_packed else (*rows, seq_len)
    return Input(inputs, "int64"), Input((*rows, seq_len), "int64")


TOKENS = SampleKind(
    name="tokens",
    settings=(
        "text",
        "train",
        "validation",
        "packing",
        "documents",
        "tokenizer_vocab_size",
        "synthetic_tokens",
        "skip_bad",
        "cache",
    ),
    tokens=lambda model: model.seq_len,
    arrays=_rows_of_tokens,
    load=Reference("polyreme.recipes.data.text_data", "load_corpus"),
    draw=Reference("polyreme.recipes.data.text_data", "random_rows"),
    check=Reference("polyreme.recipes.data.batches", "check_tokens"),
    is_counted=lambda config: config.data.packing != "concat",
    sample=Reference("polyreme.recipes.training.sampling", "go_on"),
)

MASKED_WORDS = SampleKind(
    name="masked_words",
    settings=(*TOKENS.settings, "mask_rate", "mask_copies"),
    tokens=TOKENS.tokens,
    arrays=lambda config: (
        Input((config.train.global_batch, 3, config.dimensions.seq_len), "int64"),
        Input((config.train.global_batch, 2, num_asked(config.dimensions.seq_len, config.data.mask_rate)), "int64"),
    ),
    load=Reference("polyreme.recipes.data.masked_words", "load_masked"),
    draw=Reference("polyreme.recipes.data.masked_words", "random_masked"),
    check=Reference("polyreme.recipes.data.masked_words", "check_masked"),
    is_counted=lambda config: True,
)

CONVERSATIONS = SampleKind(
    name="conversations",
    settings=(),
    tokens=TOKENS.tokens,
    arrays=TOKENS.arrays,
    load=Reference("polyreme.recipes.data.chat_samples", "load_chats"),
    draw=TOKENS.draw,
    check=TOKENS.check,
    is_counted=lambda config: True,
    sample=Reference("polyreme.recipes.training.sampling", "answer"),
    is_shown_before=True,
)


def _pairs_of_rows(config: Any) -> tuple[Input, ...]:
    """Two rows of tokens a sample, the token that follows each, and what is known of the two."""
    rows = (config.train.global_batch, 2, config.dimensions.seq_len)
    return Input(rows, "int64"), Input(rows, "int64"), Input((config.train.global_batch, 3), "float32")


PREFERENCES = SampleKind(
    name="preferences",
    settings=(),
    tokens=lambda model: 2 * model.seq_len,
    arrays=_pairs_of_rows,
    load=Reference("polyreme.recipes.data.pair_samples", "load_preferences"),
    draw=Reference("polyreme.recipes.data.pair_samples", "random_pairs"),
    check=Reference("polyreme.recipes.data.pair_samples", "check_pairs"),
    sample=CONVERSATIONS.sample,
    is_shown_before=True,
)

JUDGEMENTS = SampleKind(
    name="judgements",
    settings=(),
    tokens=PREFERENCES.tokens,
    arrays=_pairs_of_rows,
    load=Reference("polyreme.recipes.data.pair_samples", "load_judged"),
    draw=PREFERENCES.draw,
    check=PREFERENCES.check,
    sample=CONVERSATIONS.sample,
    is_shown_before=True,
)


def _groups_of_rows(config: Any) -> tuple[Input, ...]:
    """Texts that a model writes: tokens, those that follow, their log-probabilities by the model that wrote them and by
    the reference; advantage and reward of each."""
    rows = (config.train.global_batch, config.group_size, config.dimensions.seq_len)
    numbers = [Input(rows, "float32")] * 2
    return Input(rows, "int64"), Input(rows, "int64"), *numbers, Input((*rows[:2], 2), "float32")


PROMPTS = SampleKind(
    name="prompts",
    settings=(),
    tokens=TOKENS.tokens,
    arrays=_groups_of_rows,
    load=Reference("polyreme.recipes.training.rollouts", "load_prompts"),
    draw=Reference("polyreme.recipes.training.rollouts", "random_groups"),
    check=Reference("polyreme.recipes.training.rollouts", "check_prompts"),
    sample=CONVERSATIONS.sample,
    is_shown_before=True,
)

ALIGNMENTS = SampleKind(
    name="alignments",
    settings=("alignments",),
    tokens=lambda model: model.num_sequences * model.num_residues,
    arrays=lambda config: (
        Input((config.train.global_batch, config.dimensions.num_sequences, config.dimensions.num_residues), "int64"),
        Input((config.train.global_batch, config.dimensions.num_sequences, config.dimensions.num_residues), "int64"),
        Input((config.train.global_batch, config.dimensions.num_residues, config.dimensions.num_residues), "int64"),
    ),
    load=Reference("polyreme.recipes.data.alignments", "load_alignments"),
    draw=Reference("polyreme.recipes.data.alignments", "draw_alignments"),
    check=Reference("polyreme.recipes.data.alignments", "check_letters"),
)

SAMPLES: Registry[SampleKind] = Registry(
    "kind of samples", [TOKENS, MASKED_WORDS, CONVERSATIONS, PREFERENCES, JUDGEMENTS, PROMPTS, ALIGNMENTS]
)
"""Kinds of samples by the name that a family's record has."""
