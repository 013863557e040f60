"""A model as a sequence of layers under its public path; the code is distributed.pipeline's."""

from polyreme.distributed.pipeline.layer_desc import LayerDesc, SharedLayerDesc
from polyreme.distributed.pipeline.pipeline_layer import FIRST_SEED, PipelineChunk, PipelineLayer

__all__ = ["FIRST_SEED", "LayerDesc", "PipelineChunk", "PipelineLayer", "SharedLayerDesc"]
