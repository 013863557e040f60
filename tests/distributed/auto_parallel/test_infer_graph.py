"""Graphs of traced models against those made from dimensions, and against the counter of multiply-adds."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.distributed.auto_parallel.dims.graph import graph_of
from polyreme.distributed.auto_parallel.dims.infer import infer_dims
from polyreme.errors import ConfigError
from polyreme.hapi import InputSpec
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.nn import functional as F
from polyreme.nn.flops import flops
from polyreme.planner import ModelShape, Training, cluster_of_kind
from polyreme.planner.memory import memory
from polyreme.planner.predict import predict
from polyreme.vision.models import LeNet
from tests.distributed.auto_parallel.plain_models import Language, strip

SIZES = {"hidden": 64, "layers": 3, "heads": 8, "seq": 32, "vocab": 512, "ffn": 128}
GPT_SIZES = GPTConfig(512, 64, 3, 8, 32, 128)
LLAMA_SIZES = LlamaConfig(512, 64, 3, 8, 4, 128, 32)
CASES = {
    "gpt": (lambda: GPT(GPT_SIZES), ModelShape(**SIZES)),
    "llama": (
        lambda: Llama(LLAMA_SIZES),
        ModelShape(**SIZES, kv_heads=4, gated=True, biases=False, learned_positions=False, tied=False, rms_norm=True),
    ),
}
PLANS = [
    Plan.from_degrees(dp=8),
    Plan.from_degrees(dp=2, mp=4, sequence_parallel=True),
    Plan.from_degrees(sharding=4, mp=2, sharding_stage=3),
    Plan.from_degrees(dp=2, pp=2, mp=2, num_microbatches=4),
    Plan.from_degrees(dp=8, recompute="full"),
]


@pytest.mark.parametrize("name", CASES)
def test_a_traced_decoder_is_the_graph_of_its_dimensions(name):
    make, shape = CASES[name]
    ids = InputSpec([None, 32], "int64")
    graph, want = graph_of(infer_dims(strip(make()), [ids], [ids])), shape.graph()
    assert graph.num_parameters == want.num_parameters
    assert graph.flops_per_sample == want.flops_per_sample
    assert graph.tokens == want.tokens
    assert graph.tied == want.tied
    assert [(b.part, b.repeats) for b in graph.blocks] == [(b.part, b.repeats) for b in want.blocks]
    for traced, written in zip(graph.blocks, want.blocks, strict=True):
        kinds = [[op.kind for op in block.operations if op.flops] for block in (traced, written)]
        assert sorted(kinds[0]) == sorted(kinds[1])
    cluster = cluster_of_kind("a100-80g", 8)
    for plan in PLANS:
        got, model = (predict(each, plan, cluster, 64) for each in (graph, want))
        # the traced model rotates positions in ops of their own, and looks its positions up
        assert got.step_seconds == pytest.approx(model.step_seconds, rel=0.02), plan
        assert got.memory.parameters == pytest.approx(model.memory.parameters, rel=1e-6)
        assert got.memory.optimizer == pytest.approx(model.memory.optimizer, rel=1e-6)


def test_flop_are_twice_the_multiply_adds_that_layers_count():
    net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))
    assert graph_of(infer_dims(net, [InputSpec([None, 6])])).flops_per_sample == 2 * flops(net, [1, 6])
    lenet = LeNet()
    biases = 6 * 28 * 28 + 16 * 10 * 10  # which the counter adds to a convolution's multiply-adds
    found = graph_of(infer_dims(lenet, [InputSpec([None, 1, 28, 28])])).flops_per_sample
    assert found == 2 * (flops(lenet, [1, 1, 28, 28]) - biases)


class Applied(nn.Layer):
    """A function of the input and a parameter."""

    def __init__(self, fn):
        super().__init__()
        self.fn, self.weight = fn, self.create_parameter([8])

    def forward(self, x):
        return self.fn(x, self.weight)


IN, OUT, MASK, NONE = ["input"], ["output"], ["mask"], []
DERIVATIVES = {
    # kind, what the derivative reads, and float32 arrays that it shares with the forward
    "a sum": (lambda x, w: x + x, ("elementwise", NONE, 0)),
    "a product with a number": (lambda x, w: x * 2.0, ("elementwise", NONE, 0)),
    "a product with a parameter": (lambda x, w: x * w, ("elementwise", IN, 0)),
    "moved": (lambda x, w: paddle.concat([x, x.flip(0)]), ("elementwise", NONE, 0)),
    "an affine map": (lambda x, w: x.scale(2.0, 1.0), ("elementwise", NONE, 0)),
    "reduced": (lambda x, w: x.mean(1), ("elementwise", NONE, 0)),
    "dropped": (lambda x, w: F.dropout(x, 0.5), ("elementwise", MASK, 0)),
    "tanh": (lambda x, w: x.tanh(), ("elementwise", OUT, 0)),
    "relu": (lambda x, w: F.relu(x), ("elementwise", IN, 0)),
    "silu": (lambda x, w: F.silu(x), ("elementwise", IN, 1)),
    "softmax": (lambda x, w: F.softmax(x), ("elementwise", OUT, 1)),
    "gelu by erf": (lambda x, w: F.gelu(x), ("elementwise", IN, 2)),
    "gelu by tanh": (lambda x, w: F.gelu(x, approximate=True), ("elementwise", IN, 1)),
    "layer norm": (lambda x, w: F.layer_norm(x, [8], w), ("norm", IN, 0)),
    "a whole number": (lambda x, w: x.argmax(1), ("elementwise", NONE, 0)),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_what_a_derivative_reads_follows_from_the_function(name):
    fn, (kind, saved, shared) = DERIVATIVES[name]
    (block,) = graph_of(infer_dims(Applied(fn), [InputSpec([4, 8])])).blocks
    *_, op = block.operations
    names = {"input": "input", op.output.name: "output", f"{op.output.name}_mask": "mask"}
    assert (op.kind, [names[n] for n in op.saved], len(op.shared)) == (kind, saved, shared)


def test_what_only_moves_elements_is_no_operation():
    def moved(x, w):
        parts = x.reshape([-1, 2, 4]).transpose([1, 0, 2])[1].repeat_interleave(2, 1)
        return parts.astype("float16").tanh()

    (block,) = graph_of(infer_dims(Applied(moved), [InputSpec([4, 8])])).blocks
    assert [op.inputs[0].name for op in block.operations] == ["input"]


def test_a_model_of_views_alone_has_nothing_to_plan():
    with pytest.raises(ConfigError, match="only views its inputs"):
        graph_of(infer_dims(Applied(lambda x, w: x.reshape([-1, 2])), [InputSpec([4, 8])]))


def test_attention_written_out_is_what_recompute_leaves_out():
    graph = graph_of(infer_dims(Language(("repeat", "repeat"), kv_heads=2), [InputSpec([None, 12], "int64")]))
    embed, layer, head = graph.blocks
    assert (embed.part, layer.part, layer.repeats, head.part) == ("embed", "layer", 2, "head")
    core = [op for op in layer.operations if op.part == "core_attn" and op.flops]
    assert [op.kind for op in core] == ["product", "product"]
    assert core[0].output.dims == ("batch", "heads", "block_seq", None)
    rest = [op.weights for op in layer.operations if op.part == "full_attn" and op.kind == "product"]
    assert len(rest) == 4  # q, k, v and the output
    assert graph.tied
    assert {p.name for p in embed.parameters} == {"tokens.weight", "places"}


def test_a_loss_and_its_logits_are_held():
    """Of a plain encoder: what a mean is taken of lies there whole, with its gradient."""
    model = nn.Sequential(nn.Embedding(64, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), nn.Linear(8, 960))
    ids = np.zeros((8, 16), np.int64)
    told, bare = (graph_of(infer_dims(model, [ids], *more)) for more in (([ids], nn.CrossEntropyLoss()), ()))
    (made,) = [op for block in told.blocks for op in block.operations if op.kind == "loss"]
    assert made.is_whole
    assert made.inputs[0].shape == (1, 16, 960)
    assert not any(op.kind == "loss" for block in bare.blocks for op in block.operations)
    wide = Training(dtype="float32", master=False)
    assert memory(told, Plan(), 8, wide)[0].workspace >= 2 * 4 * 8 * 16 * 960
    assert memory(bare, Plan(), 8, wide)[0].workspace < 4 * 8 * 16 * 960
