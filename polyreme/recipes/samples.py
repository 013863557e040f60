"""Kinds of samples that models are trained on, as records: what a run asks of its data without knowing what it is.

A new kind is a file beside this one and a record in SAMPLES, whose name a family's record has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from polyreme.registry import Reference, Registry


class Input(NamedTuple):
    """One array of a batch: its shape, the batch first, and its dtype."""

    shape: tuple[int, ...]
    dtype: Any


Loader = Callable[..., Any]
"""(PretrainConfig, folder that relative paths are looked for in) -> the data: train and validation, which have a length
and give a sample's arrays by its number (what the model takes, then its labels); sampler, which makes the order they
are read in; digest, which a resumed run compares;
summary, how much it is; shown(number), a training sample as text; tokenizer, or None."""

Drawer = Callable[..., tuple]
"""(PretrainConfig, steps) -> for each step the arrays of a whole batch, made up."""

Checker = Callable[..., None]
"""(Batch, ModelConfig, which batch it is) -> raises DataError for a sample that the model cannot take."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleKind:
    """One kind of samples. settings: keys of data: that it alone has a use for. tokens: how many tokens a sample counts
    as, given the model's configuration. arrays: of a global batch, given the run's configuration, the labels last.
    is_counted: whether labels may be data.packing.NO_LABEL, which the loss leaves out, given the same."""

    name: str
    settings: tuple[str, ...]
    tokens: Callable[[Any], int]
    arrays: Callable[[Any], tuple[Input, ...]]
    load: Reference[Loader]
    draw: Reference[Drawer]
    check: Reference[Checker]
    is_counted: Callable[[Any], bool] = lambda config: False
    aliases: tuple[str, ...] = ()


def labels_of(arrays: Sequence[Any]) -> Any:
    """The labels a model takes, given a sample's arrays but the first: the array itself where it is one.

    >>> labels_of([1]), labels_of([1, 2])
    (1, (1, 2))
    """
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


TOKENS = SampleKind(
    name="tokens",
    settings=(
        "text",
        "train",
        "validation",
        "packing",
        "tokenizer_vocab_size",
        "synthetic_tokens",
        "skip_bad",
        "cache",
    ),
    tokens=lambda model: model.seq_len,
    arrays=lambda config: (
        Input(
            (config.train.global_batch, *((3,) if config.data.packing == "best_fit" else ()), config.model.seq_len),
            "int64",
        ),
        Input((config.train.global_batch, config.model.seq_len), "int64"),
    ),
    load=Reference("polyreme.recipes.text_data", "load_corpus"),
    draw=Reference("polyreme.recipes.text_data", "random_rows"),
    check=Reference("polyreme.recipes.batches", "check_tokens"),
    is_counted=lambda config: config.data.packing != "concat",
)

ALIGNMENTS = SampleKind(
    name="alignments",
    settings=("alignments",),
    tokens=lambda model: model.num_sequences * model.num_residues,
    arrays=lambda config: (
        Input((config.train.global_batch, config.model.num_sequences, config.model.num_residues), "int64"),
        Input((config.train.global_batch, config.model.num_sequences, config.model.num_residues), "int64"),
        Input((config.train.global_batch, config.model.num_residues, config.model.num_residues), "int64"),
    ),
    load=Reference("polyreme.recipes.alignments", "load_alignments"),
    draw=Reference("polyreme.recipes.alignments", "draw_alignments"),
    check=Reference("polyreme.recipes.alignments", "check_letters"),
)

SAMPLES: Registry[SampleKind] = Registry("kind of samples", [TOKENS, ALIGNMENTS])
"""Kinds of samples by the name that a family's record has."""
