"""What a row says about a run that no prediction follows: told, never dropped.

Words, cells that were taken as something else, and degrees that divide nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from polyreme.mesh import Plan
from polyreme.planner.model_shape import ModelShape
from polyreme.planner.published_cells import Cells

NOT_MODELLED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("sliding window", "sliding-window", "swa", "local attention"), "attention over a window is priced whole"),
    (("qlora", "4-bit base", "nf4"), "frozen weights in 4 bits are held as 16"),
    (("lion", "adafactor", "sgd", "muon", "shampoo", "8-bit adam", "adam8bit", "lamb"), "the update is AdamW's"),
    (("parallel transformer block", "parallel block", "ptb"), "attention and feed-forward one after the other"),
    (
        (
            *("cpu offload", "offload to cpu", "offload_param", "offload-param", "zero-infinity", "nvme"),
            *("host offload", "offload to host", "optimizer offload", "offload_optimizer", "offload-optimizer"),
        ),
        "nothing is offloaded",
    ),
    (
        ("dualpipe", "zero bubble", "zero-bubble", "zb-h1", "zbh1", "zbv", "chimera", "gpipe"),
        "the pipeline is the default, one forward and one backward in turn",
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


def taken_otherwise(cells: Cells, assumed: Mapping[str, object]) -> list[str]:
    """A line for each cell that says something and was taken as something else: a dp that the other degrees do not
    leave, a batch that they do not divide, a word that is not known."""
    told = {line.split(" ")[0] for line in cells.not_understood}
    return [
        f"{column} {cells.text(column)!r}: taken as {str(value).split(', as ')[0]}"
        for column, value in assumed.items()
        # of a model's name only more is known than the columns say; interleaved stages are, so many as are fastest
        if cells.text(column) not in ("", str(value))
        and column not in (*told, "model")
        and "interleav" not in cells.text(column).lower()
    ]


def not_divided(model: ModelShape, plan: Plan) -> list[str]:
    """A line for each degree that does not divide what it should cut, which every device then has whole."""
    mesh = plan.mesh
    among = plan.expert_axes if model.experts else ()
    cut = [("tp", mesh.mp, "heads", model.heads), ("cp", mesh.sep, "tokens of a row", model.seq)]
    if not model.experts or model.dense_layers:
        cut.append(("tp", mesh.mp, "numbers of a feed-forward layer", model.ffn))
    cut.append(("ep", math.prod(mesh.degree(axis) for axis in among), "experts", model.experts))
    return [
        f"{column} {degree}: does not divide the {size:,} {what}; every device has all of them"
        for column, degree, what, size in cut
        if size % degree
    ]


def _says(text: str, word: str) -> bool:
    """The word by itself, as short ones are parts of others."""
    return re.search(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z])", text) is not None
