"""Words of a row that say something about a run which no prediction follows: told, never dropped."""

from __future__ import annotations

import re

from polyreme.planner.published_cells import Cells

NOT_MODELLED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("sliding window", "sliding-window", "swa", "local attention"), "attention over a window is priced whole"),
    (("qlora", "4-bit base", "nf4"), "frozen weights in 4 bits are held as 16"),
    (("lion", "adafactor", "sgd", "muon", "shampoo", "8-bit adam", "adam8bit", "lamb"), "the update is AdamW's"),
    (("parallel transformer block", "parallel block", "ptb"), "attention and feed-forward one after the other"),
    (
        ("cpu offload", "offload to cpu", "offload_param", "offload-param", "zero-infinity", "nvme"),
        "nothing is offloaded",
    ),
    (("capacity factor", "token drop", "tokendrop", "capacity"), "experts compute all rows, none is dropped"),
    (("hybrid shard", "hsdp", "mics"), "sharded over the degree that zero_or_fsdp says, or all"),
    (("quantized gather", "compressed", "1-bit", "qwz", "zero++"), "collectives are whole"),
    (("shared network", "oversubscribed", "contention", "preempt"), "the network is taken as free"),
    (("mamba", "ssm", "retention", "linear attention", "rwkv"), "layers are attention and feed-forward"),
    (("vision", "multimodal", "encoder-decoder", "t5"), "the model is a decoder"),
    (("padding", "variable length"), "every row is full"),
)
"""(words, what is done instead)."""

CAPACITY = re.compile(r"capacity[ _-]factor[ =:]*(\d+(?:\.\d+)?)")
"""Rows that there is room for at each expert, over those that come on the mean."""


def not_modelled(cells: Cells) -> list[str]:
    """A line for each thing that the row's words say and no prediction follows."""
    text = f"{cells.words}; {cells.text('dtype').lower()}; {cells.text('model').lower()}"
    text = CAPACITY.sub("", text)
    lines = []
    for words, instead in NOT_MODELLED:
        said = next((word for word in words if _says(text, word)), None)
        if said is not None:
            lines.append(f"{said!r}: {instead}")
    return lines


def _says(text: str, word: str) -> bool:
    """The word by itself, as short ones are parts of others."""
    return re.search(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z])", text) is not None
