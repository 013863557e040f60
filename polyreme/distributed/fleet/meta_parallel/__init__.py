"""Models and layers for hybrid parallelism under their public path."""

from polyreme.distributed.fleet.meta_parallel.pp_layers import LayerDesc, PipelineLayer, SharedLayerDesc

__all__ = ["LayerDesc", "PipelineLayer", "SharedLayerDesc"]
