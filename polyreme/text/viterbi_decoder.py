"""ViterbiDecoder: viterbi_decode with transitions of its own."""

from __future__ import annotations

from typing import Any

from polyreme.nn.layer import Layer
from polyreme.ops.viterbi import viterbi_decode


class ViterbiDecoder(Layer):
    """(scores [b], tags [b, n]) of potentials [b, t, k] and lengths [b]: `viterbi_decode` with transitions [k, k].

    >>> import numpy as np
    >>> from polyreme.eager.tensor import Tensor
    >>> decode = ViterbiDecoder(Tensor(np.zeros((2, 2), "float32")), include_bos_eos_tag=False)
    >>> scores, tags = decode(Tensor(np.array([[[0.0, 1.0], [2.0, 0.0]]], "float32")), Tensor(np.array([2])))
    >>> scores.tolist(), tags.tolist()
    ([3.0], [[1, 0]])
    """

    def __init__(self, transitions: Any, include_bos_eos_tag: bool = True, name: str | None = None) -> None:
        super().__init__(name)
        self.transitions = transitions
        self.include_bos_eos_tag = include_bos_eos_tag

    def forward(self, potentials: Any, lengths: Any) -> tuple[Any, Any]:
        return viterbi_decode(potentials, self.transitions, lengths, self.include_bos_eos_tag)
