"""fluid.evaluator: measures whose counts a Program keeps itself, from minibatch to minibatch."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme.core import unique_name
from polyreme.errors import DataError
from polyreme.fluid import layers
from polyreme.fluid.metrics import DetectionMAP
from polyreme.program.scope import global_scope


class Evaluator:
    """Base: states are persistable Variables that the Program adds to; metrics, of a minibatch, are to be fetched."""

    def __init__(self, name: str) -> None:
        self._name = unique_name.generate(name)
        self.states: list[Any] = []
        self.metrics: list[Any] = []

    def reset(self, executor: Any, reset_program: Any = None) -> None:
        """Begin to count anew. reset_program changes nothing: values in the scope are set."""
        for state in self.states:
            variable = global_scope().find_var(state.name)
            if variable is not None:
                variable.get_tensor().set(np.zeros(state.shape, state.dtype), "cpu")

    def eval(self, executor: Any, eval_program: Any = None) -> Any:
        """The measure over all minibatches since reset()."""
        raise NotImplementedError(f"{type(self).__name__} needs eval(executor)")

    def _count(self, suffix: str, dtype: str, addend: Any) -> Any:
        """A Variable that starts from 0, and to which the Program adds."""
        state = layers.create_global_var([1], 0, dtype, persistable=True, name=f"{self._name}.{suffix}")
        layers.sums([state, layers.cast(layers.reshape(addend, [1]), dtype)], out=state)
        self.states.append(state)
        return state

    def _values(self) -> list[float]:
        return [np.asarray(global_scope().find_var(state.name).get_tensor()).item() for state in self.states]


class ChunkEvaluator(Evaluator):
    """Precision, recall and F1 of chunks of tags; see layers.chunk_eval, whose first three results are the metrics."""

    def __init__(
        self, input: Any, label: Any, chunk_scheme: str, num_chunk_types: int, excluded_chunk_types: Any = None
    ) -> None:
        super().__init__("chunk_eval")
        *self.metrics, inferred, labelled, right = layers.chunk_eval(
            input, label, chunk_scheme, num_chunk_types, excluded_chunk_types
        )
        for suffix, count in (("inferred", inferred), ("labelled", labelled), ("right", right)):
            self._count(suffix, "int64", count)

    def eval(self, executor: Any, eval_program: Any = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(precision, recall, F1), float32 [1] each."""
        inferred, labelled, right = self._values()
        precision, recall = (right / count if count else 0.0 for count in (inferred, labelled))
        f1 = 2 * precision * recall / (precision + recall) if right else 0.0
        precision_array, recall_array, f1_array = (np.array([v], "float32") for v in (precision, recall, f1))
        return precision_array, recall_array, f1_array


class EditDistance(Evaluator):
    """The average edit distance of sequences, and the part of them that are not right.

    metrics: the sum of the distances of a minibatch, and how many of its sequences are not right.
    """

    def __init__(self, input: Any, label: Any, ignored_tokens: Any = None, **kwargs: Any) -> None:
        super().__init__("edit_distance")
        distances, count = layers.edit_distance(input, label, ignored_tokens=ignored_tokens, **kwargs)
        wrong = layers.reduce_sum(layers.cast(layers.not_equal(distances, layers.zeros_like(distances)), "int64"))
        self.metrics = [layers.reduce_sum(distances), wrong]
        for suffix, dtype, value in (
            ("distance", "float32", self.metrics[0]),
            ("sequences", "int64", count),
            ("wrong", "int64", wrong),
        ):
            self._count(suffix, dtype, value)

    def eval(self, executor: Any, eval_program: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """(average distance, part of sequences that are not right), float32 [1] each. Raises DataError before a run."""
        distance, count, wrong = self._values()
        if not count:
            raise DataError("EditDistance.eval: no minibatch was run since reset(); run the Program first")
        return np.array([distance / count], "float32"), np.array([wrong / count], "float32")


__all__ = ["ChunkEvaluator", "DetectionMAP", "EditDistance", "Evaluator"]
