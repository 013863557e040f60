"""NoPipelineParallel: a PipelineLayer of one stage, which trains whole batches as one of several stages does."""

from __future__ import annotations

from typing import Any

from polyreme.distributed.fleet.meta_parallel.pipeline_parallel import PipelineParallel
from polyreme.distributed.fleet.meta_parallel.wrappers import split_batch
from polyreme.distributed.pipeline.pipeline_layer import PipelineLayer


class NoPipelineParallel(PipelineParallel):
    """A PipelineLayer of one stage: train_batch and eval_batch cut a batch into microbatches, run one after another on
    all devices of the mesh; called like a Layer it runs the model.
    """

    def __init__(self, layers: PipelineLayer, strategy: Any = None, hcg: Any = None) -> None:
        super().__init__(layers, hcg, strategy)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = split_batch((inputs, kwargs), self.layout)
        with self._job.amp.autocast():
            return self._layers(*inputs, **kwargs)
