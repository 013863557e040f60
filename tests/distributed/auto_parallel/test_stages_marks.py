"""Models whose layers are marked on several meshes train as pipelines, equal to one device."""

import jax
import numpy as np
import pytest

from polyreme import nn
from polyreme.core import rng
from polyreme.distributed.auto_parallel.layers.parallelize import parallelize
from polyreme.distributed.auto_parallel.layers.plans import ColWiseParallel, RowWiseParallel
from polyreme.distributed.auto_parallel.layers.split_points import SplitPoint
from polyreme.distributed.auto_parallel.stages.marks import cut_by_marks
from polyreme.distributed.auto_parallel.tensors.dist_tensor import shard_tensor
from polyreme.distributed.auto_parallel.tensors.placements import Replicate, Shard
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh, clear_mesh
from polyreme.distributed.auto_parallel.tensors.reshard import reshard
from polyreme.distributed.pipeline.runtime import Pipeline
from polyreme.distributed.placement import clear_plan
from polyreme.errors import ConfigError, PlacementError
from polyreme.mesh import Plan
from tests.distributed.auto_parallel.one_device import TOKENS, alone, assert_same, trained

F = nn.functional
ORDER = ("pp", "dp", "mp", "sharding", "sep", "ep")
MESH = ProcessMesh(np.arange(4).reshape(2, 1, 2), ["pp", "dp", "mp"])
STAGES = [MESH[0], MESH[1]]
INPUTS = (TOKENS[:, :-1], TOKENS[:, 1:])


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    clear_plan()
    clear_mesh()


class Tied(nn.Layer):
    """An embedding that gives the output weights too, and two Linears; moves: says that it goes to the second mesh."""

    def __init__(self, moves=False):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.moves = moves

    def forward(self, ids, labels):
        x = self.tokens(ids)
        if self.moves:
            x = reshard(x, STAGES[1], [Shard(0), Replicate()])
        x = x + self.down(F.relu(self.up(self.norm(x))))
        logits = x.matmul(self.tokens.weight, transpose_y=True)
        return F.cross_entropy(logits.reshape([-1, 16]), labels.reshape([-1]))


def plan(**changes):
    return Plan.from_degrees(**{"pp": 2, "mp": 2, "num_microbatches": 2, "order": ORDER, **changes})


def by_hand(model):
    def mark(layer, mesh, *placements):
        layer.weight = shard_tensor(layer.weight, mesh, [Replicate(), *placements])

    mark(model.tokens, STAGES[0], Shard(0))
    mark(model.up, STAGES[1], Shard(1))
    mark(model.down, STAGES[1], Shard(0))


def by_config(model):
    plans = {"up": ColWiseParallel(), "down": RowWiseParallel()}
    config = {"mp_config": {"parallelize_plan": plans}, "pp_config": {"split_spec": {"norm": SplitPoint.END}}}
    parallelize(model, mesh=MESH, config=config)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("mark", "schedule", "first"),
    [(by_hand, "ZBH1", ["tokens.weight"]), (by_config, "1F1B", ["tokens.weight", "norm.weight", "norm.bias"])],
)
def test_marked_stages_equal_one_device(mark, schedule, first):
    rng.seed(3)
    model = Tied(moves=mark is by_hand)
    mark(model)
    layout, chunks = cut_by_marks(model, STAGES, plan(schedule=schedule), tuple(x[:4] for x in INPUTS))
    ours = trained(model, Pipeline(chunks, [lambda loss, _: loss], layout), INPUTS, [2, 2])
    assert_same(ours, alone(Tied, INPUTS, [2, 2]), INPUTS)
    assert {id(p) for p in chunks[0].parameters()} == {id(p) for n, p in model.named_parameters() if n in first}
    # a weight is where it was marked, and split as it was; the tied one is at home on the first stage
    assert model.up.weight.process_mesh == STAGES[1]
    assert model.up.weight.placements == [Replicate(), Shard(1)]
    assert model.up.weight._array.sharding.shard_shape((8, 12)) == (8, 6)
    assert model.tokens.weight._array.sharding.device_set == set(jax.devices()[:2])
    # what was not marked is on the stage that reads it
    assert model.up.bias.process_mesh == STAGES[1]


def test_marks_that_no_pipeline_can_follow_are_refused():
    model = Tied()
    by_hand(model)
    inputs = tuple(x[:4] for x in INPUTS)
    with pytest.raises(PlacementError, match=r"marked on 2 meshes, .* and the plan's mesh is pp2 mp4"):
        cut_by_marks(model, STAGES, plan(mp=4), inputs)
    with pytest.raises(ConfigError, match="'linear' belongs on stage 0 but takes what chunk 1, on stage 1, gives"):
        cut_by_marks(model, STAGES[::-1], plan(), inputs)
