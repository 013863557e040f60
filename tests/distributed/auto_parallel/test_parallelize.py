"""Models spread by shard_layer and by plans train as they do on one device; what is wrong in a config is told."""

import doctest
import re

import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.distributed import (
    ColWiseParallel,
    ContextParallel,
    ConvParallel,
    PrepareContextParallel,
    PrepareLayerInput,
    PrepareLayerOutput,
    ProcessMesh,
    Replicate,
    RowWiseParallel,
    SequenceParallelBegin,
    SequenceParallelDisable,
    SequenceParallelEnable,
    SequenceParallelEnd,
    Shard,
    SplitPoint,
    get_mesh,
    parallelize,
    shard_layer,
    shard_tensor,
)
from polyreme.distributed.auto_parallel import plans
from polyreme.distributed.auto_parallel.process_mesh import clear_mesh
from polyreme.errors import ConfigError, ProgramError

from .small_models import RATE, Plain, assert_same, batches, llama, train

MESH = ProcessMesh(np.arange(8).reshape(2, 4), ["dp", "mp"])
LLAMA_PLAN = {
    "tokens": ColWiseParallel(),
    r"blocks\.\d+\.attention\.[qkv]": ColWiseParallel(),
    "blocks.*.attention.out": RowWiseParallel(),
    "blocks.*.ffn.(gate|up)": ColWiseParallel(),
    "blocks.*.ffn.down": RowWiseParallel(),
    "head.weight": ColWiseParallel(),
}
PLAIN_PLAN = {
    "tokens": RowWiseParallel(),
    "blocks.*.(qkv|up)": ColWiseParallel(),
    "blocks.*.(out|down)": RowWiseParallel(),
    "head": [ColWiseParallel(gather_output=True)],
}


@pytest.fixture(autouse=True)
def _no_mesh_is_left():
    yield
    clear_mesh()


def momentum(model):
    return paddle.optimizer.Momentum(RATE, 0.9, parameters=model.parameters())


@pytest.fixture(scope="module")
def llama_alone():
    model = llama()
    return train(model, momentum(model), batches(32))


@pytest.fixture(scope="module")
def plain_alone():
    model = Plain()
    return train(model, momentum(model), batches(16))


def test_llama_by_parallelize_equals_one_device(llama_alone):
    model = llama()
    model, optimizer = parallelize(model, momentum(model), MESH, {"mp_config": {"parallelize_plan": LLAMA_PLAN}})
    assert get_mesh() is MESH
    assert_same(train(model, optimizer, batches(32)), llama_alone)
    q, norm = model.blocks[0].attention.q.weight, model.norm.weight
    assert (q.placements, q._local_shape) == ([Replicate(), Shard(1)], [16, 4])
    assert (norm.placements, model.cos.placements) == ([Replicate(), Replicate()], [Replicate(), Replicate()])
    assert model.blocks[0].ffn.down.weight.placements == [Replicate(), Shard(0)]
    assert {s.data.shape for s in optimizer._slots["velocity"][id(q)]._array.addressable_shards} == {(16, 4)}


def test_llama_by_shard_layer_equals_one_device(llama_alone):
    seen = []

    def place(name, layer, mesh):
        seen.append(name)
        if re.search(r"attention\.[qkv]$|gate|up", name):
            layer.weight = shard_tensor(layer.weight, mesh, [Replicate(), Shard(1)])

    def split(inputs, mesh):
        return tuple(shard_tensor(x, mesh, [Shard(0), Replicate()]) for x in inputs)

    model = llama()
    assert shard_layer(model, MESH, place, split, lambda loss, mesh: loss * 1.0) is model
    assert seen[0] == ""
    assert "blocks.0.attention.q" in seen
    assert model.blocks[0].attention.q.weight.placements == [Replicate(), Shard(1)]
    assert model.head.weight.placements == [Replicate(), Replicate()]
    assert_same(train(model, momentum(model), batches(32)), llama_alone)


@pytest.mark.parametrize("captured", [True, False])
def test_plain_layers_equal_one_device(plain_alone, captured):
    model = Plain()
    model, optimizer = parallelize(model, momentum(model), MESH, {"mp_config": {"parallelize_plan": PLAIN_PLAN}})
    assert model.blocks[0].up.bias.placements == [Replicate(), Shard(0)]
    assert model.blocks[0].down.bias.placements == [Replicate(), Replicate()]
    assert_same(train(model, optimizer, batches(16), captured), plain_alone)
