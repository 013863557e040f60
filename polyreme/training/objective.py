"""Objectives of a training step other than a model's own loss, on one mesh and over pipeline stages alike."""

from __future__ import annotations

from typing import Any, Literal


class Objective:
    """A loss in the parts that lie on different pipeline stages: what the model reads, and what is made of its output.

    Called with (model, inputs, labels) it gives the mean loss, 0-D, and what it tells beside it. reads: whether `cost`
    takes a decoder's logits or its hidden states. told: names of what cost tells.
    """

    reads: Literal["logits", "hidden"] = "logits"
    told: tuple[str, ...] = ()

    def rows(self, inputs: Any) -> Any:
        """The model's inputs from a batch's: arrays on the host or Tensors."""
        return inputs

    def targets(self, inputs: Any, labels: Any) -> Any:
        """The inputs of cost beside the model's output."""
        return labels

    def cost(self, model: Any, output: Any, targets: Any) -> tuple[Any, dict[str, Any]]:
        """(the mean loss, Tensors by the names of `told`) of what `reads` says."""
        raise NotImplementedError

    def __call__(self, model: Any, inputs: Any, labels: Any) -> tuple[Any, dict[str, Any]]:
        rows = self.rows(inputs)
        output = model(rows) if self.reads == "logits" else model.hidden(rows)
        return self.cost(model, output, self.targets(inputs, labels))

    def of_stream(self, model: Any, stream: Any, targets: Any) -> tuple[Any, dict[str, Any]]:
        """The same of what the last of a decoder's pipeline_items gives."""
        output = model.pipeline_output(stream) if self.reads == "logits" else model.in_own_order(stream)
        return self.cost(model, output, targets)
