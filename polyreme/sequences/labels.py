"""Layer functions for labels of sequences: linear_chain_crf, crf_decoding, edit_distance, ctc_greedy_decoder.

Source: PaddlePaddle 1.7, `fluid.layers`, nn.py and loss.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.errors import ConfigError, ProgramError
from polyreme.nn.parameter import ParamAttr
from polyreme.ops import OPS
from polyreme.program.block import Variable
from polyreme.program.current import defaults
from polyreme.program.parameters import LayerParameters
from polyreme.sequences import lod as lods
from polyreme.sequences.lod import divided, inner, sequences


def _ragged(what: str, input: Any, length: Any, *others: Any) -> tuple[Any, Variable, Any, list[Any]]:
    """(rows, lengths, steps, the others' rows), of Variables with sequences, or padded ones and their lengths."""
    if length is None:
        x, lod = sequences(what, input)
        return x, inner(lod), lods.room(x, lod), list(others)
    x, length = lods.variable(what, input), lods.variable(what, length)
    room = lods.rows(OPS["flatten"](x, 0, 1))
    unpadded = [None if v is None else OPS["sequence_unpad"](v, length, room) for v in (x, *others)]
    return unpadded[0], length, x._array.shape[1], unpadded[1:]


def linear_chain_crf(input: Any, label: Any, param_attr: Any = None, length: Any = None) -> Variable:
    """-log p(label | input) of each sequence, [n, 1]: input [rows, tags] and label [rows, 1] with sequences, or padded
    [n, maxlen, tags], [n, maxlen] with length [n].

    Weight [tags + 2, tags]: of starting and of stopping with each tag, then from each tag to each.
    """
    tags = lods.variable("linear_chain_crf", input).shape[-1]
    if param_attr is False:
        raise ConfigError("linear_chain_crf: param_attr=False; it has a weight")
    weight = LayerParameters("linear_chain_crf").parameter(param_attr, [tags + 2, tags], input.dtype)
    x, lengths, steps, (label,) = _ragged("linear_chain_crf", input, length, label)
    return divided(OPS["linear_chain_crf"](x, lengths, weight, label, steps), ())


def crf_decoding(input: Any, param_attr: Any, label: Any = None, length: Any = None) -> Variable:
    """The likeliest tag of each row, int64 [rows, 1], by the weight that linear_chain_crf made under param_attr's name.

    With label: 1 where the tag is the label, else 0. With length, padded: [n, maxlen, tags] -> [n, maxlen].
    """
    attr = ParamAttr.of(param_attr)
    weight = None if attr is None or attr.name is None else defaults.main.global_block().find_var(attr.name)
    if weight is None:
        raise ProgramError(
            f"crf_decoding: param_attr={param_attr!r} names no parameter of this Program; give the name that "
            "linear_chain_crf was given"
        )
    x, lengths, steps, (label,) = _ragged("crf_decoding", input, length, label)
    path = OPS["crf_decoding"](x, lengths, weight, label, steps)
    if length is None:
        return divided(path, lods.lod_of(input))
    return divided(OPS["squeeze"](OPS["sequence_pad"](path, lengths, 0, steps)[0], 2), ())


def edit_distance(
    input: Any,
    label: Any,
    normalized: bool = True,
    ignored_tokens: Sequence[int] | None = None,
    input_length: Any = None,
    label_length: Any = None,
) -> tuple[Variable, Variable]:
    """(Levenshtein distance of each pair of sequences, float32 [n, 1]; how many pairs, int64 [1]).

    input and label: ids [rows, 1] with sequences, or padded [n, maxlen] with input_length and label_length [n].
    normalized divides by the label's length. ignored_tokens are taken out first.
    """
    if (input_length is None) != (label_length is None):
        raise ConfigError("edit_distance: give both input_length and label_length, or neither")
    if input_length is not None:
        distances = OPS["edit_distance"](input, label, normalized, ignored_tokens, input_length, label_length)
        return divided(distances[0], ()), divided(distances[1], ())
    (x, of), (y, by) = (sequences("edit_distance", v) for v in (input, label))
    steps = [lods.room(v, lod) for v, lod in ((x, of), (y, by))]
    distances = OPS["sequence_edit_distance"](x, inner(of), y, inner(by), normalized, ignored_tokens, *steps)
    return divided(distances[0], ()), divided(distances[1], ())


def ctc_greedy_decoder(
    input: Any, blank: int, input_length: Any = None, padding_value: int = 0, name: str | None = None
) -> Any:
    """The likeliest class of each step, repeats merged and blanks removed, int64.

    input [rows, classes] with sequences -> ids [rows, 1] with sequences (those of no sequence at the end are -1, and
    left out when fetched); or [n, steps, classes] and input_length [n, 1] -> ([n, steps] filled with padding_value,
    lengths [n, 1]).
    """
    if input_length is None:
        x, lod = sequences("ctc_greedy_decoder", input)
        found, made = OPS["sequence_ctc_greedy_decoder"](x, inner(lod), blank)
        return divided(found, [lods.offsets(made)])
    x = lods.variable("ctc_greedy_decoder", input)
    found = OPS["ctc_greedy_decoder"](x, input_length, blank, padding_value)
    return divided(found[0], ()), divided(found[1], ())
