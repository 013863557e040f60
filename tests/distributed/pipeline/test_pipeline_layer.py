"""PipelineLayer: how a sequence of layers is cut, built, shared, run, saved and loaded."""

import itertools

import numpy as np
import pytest

from polyreme.core import rng
from polyreme.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from polyreme.distributed.pipeline.segments import balanced
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, ConfigError
from polyreme.jit import to_static
from polyreme.nn import CrossEntropyLoss, Dropout, Embedding, Layer, Linear, ReLU


class Block(Layer):
    def __init__(self, width):
        super().__init__()
        self.up = Linear(width, width)

    def forward(self, x):
        return x + self.up(x).tanh()


class Head(Layer):
    """Another class than the embedding's, sharing its weight under another name."""

    def __init__(self, vocab, width):
        super().__init__()
        self.table = self.create_parameter([vocab, width])
        self.bias = self.create_parameter([vocab], is_bias=True)

    def forward(self, x):
        return x.matmul(self.table, transpose_y=True) + self.bias


def logits(layer, x):
    return x.matmul(layer.weight, transpose_y=True)


def tied(width=4, vocab=6, **settings):
    return PipelineLayer(
        [
            SharedLayerDesc("embed", Embedding, None, "weight", vocab, width),
            *[LayerDesc(Block, width) for _ in range(4)],
            ReLU(),
            SharedLayerDesc("embed", Embedding, logits, "weight", vocab, width),
        ],
        **settings,
    )


TOKENS = to_tensor(np.arange(6).reshape(2, 3))


# the cut: values of PaddlePaddle 3.3.1's SegmentLayers for the same six layers


@pytest.mark.parametrize(
    ("method", "stages", "want"),
    [
        ("uniform", 2, [0, 3, 6]),
        ("uniform", 3, [0, 2, 4, 6]),
        ("uniform", 4, [0, 1, 2, 4, 6]),
        ("layer:Linear", 3, [0, 1, 3, 6]),
        ("layer:linear", 3, [0, 1, 3, 6]),
        ("layer:relu", 3, [0, 2, 4, 6]),
        ("layer:relu|linear", 1, [0, 6]),
        ([0, 3], 2, [0, 3, 6]),
        ([0, 3, 6], 2, [0, 3, 6]),
        ("parameters", 2, [0, 4, 6]),
    ],
)
def test_boundaries_of_each_method(method, stages, want):
    layers = [LayerDesc(Linear, 2, 2), LayerDesc(ReLU), Linear(2, 2), relu, LayerDesc(Linear, 2, 4), ReLU()]
    assert PipelineLayer(layers, stages, seg_method=method).segment_parts == want


def relu(x):
    return x.clip(min=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_stages": 8}, r"7 layers cannot make 8 parts.*at least 8 layers"),
        ({"num_stages": 4, "num_virtual_pipeline_stages": 2}, r"7 layers cannot make 8 parts"),
        (
            {"num_stages": 3, "seg_method": "layer:Block"},
            r"matches 4 layers.*3 parts.*make it 3 or 6 layers, or 2 parts",
        ),
        ({"num_stages": 2, "seg_method": "layer:Conv"}, r"matches no layer; the classes are Embedding, Block, ReLU"),
        ({"num_stages": 2, "seg_method": "layer:("}, r"not a regular expression"),
        ({"num_stages": 2, "seg_method": "even"}, r"unknown seg_method 'even'; give 'uniform'"),
        ({"num_stages": 2, "seg_method": [1, 3]}, r"does not cut 7 layers into 2 parts"),
        ({"num_stages": 2, "seg_method": [0, 3, 5]}, r"does not cut 7 layers into 2 parts"),
        ({"num_stages": 3, "seg_method": [0, 3, 3]}, r"does not cut"),
        ({"num_stages": 2, "seg_method": [0, 2.0]}, r"does not cut"),
        ({}, r"give num_stages, or a topology"),
        ({"num_stages": 0}, r"num_stages is a whole number of at least 1, got 0"),
        ({"num_stages": 2, "num_virtual_pipeline_stages": 3, "use_dualpipev": True}, r"2 chunks on each stage"),
        ({"num_stages": 2, "recompute_interval": -1}, r"recompute_interval is a whole number of at least 0"),
        ({"num_stages": 2, "recompute_ctx": {"ofload": True}}, r"unknown key 'ofload'.*did you mean 'offload'"),
        (
            {"num_stages": 2, "recompute_ctx": {"offload": "no"}},
            r"recompute_ctx\['offload'\] is True or False, got 'no'",
        ),
        ({"num_stages": 2, "use_dualpipev": "no"}, r"use_dualpipev is True or False, got 'no'"),
        ({"num_stages": 2, "loss_fn": Linear(2, 2)}, r"loss_fn Linear has parameters"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        tied(**settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerDesc(relu), r"class derived from nn.Layer, got <function relu"),
        (lambda: SharedLayerDesc("k", Linear, 3, "weight", 2, 2), r"forward_func is a function"),
        (lambda: PipelineLayer([Linear, ReLU()], 1), r"item 0 is .*LayerDesc\(Linear, 8, 8\)"),
        (lambda: PipelineLayer([ReLU(), 3], 1), r"item 1 is 3"),
        (lambda: PipelineLayer(Linear(2, 2), 1), r"layers is a list.*got Linear"),
        (lambda: PipelineLayer([ReLU()], 1, recompute_ctx=3), r"recompute_ctx is a dict.*got 3"),
        (lambda: PipelineLayer([ReLU()], 1, loss_fn=[3]), r"loss_fn is a function"),
        (lambda: PipelineLayer([ReLU()], topology=3), r"topology is a CommunicateTopology, got int"),
    ],
)
def test_wrong_types_are_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_parameter_counts_are_balanced():
    generator = np.random.default_rng(0)
    for parts in (1, 2, 3, 4):
        sizes = [int(s) for s in generator.integers(0, 50, 8)]
        bounds = balanced(sizes, parts)

        def largest(cut, sizes=sizes):
            return max(sum(sizes[a:b]) for a, b in itertools.pairwise(cut))

        every = ([0, *cut, 8] for cut in itertools.combinations(range(1, 8), parts - 1))
        assert all(a < b for a, b in itertools.pairwise(bounds))
        assert largest(bounds) == min(map(largest, every))


def test_chunks_lie_round_after_round_or_as_a_v():
    plain = tied(num_stages=2, num_virtual_pipeline_stages=3)
    assert plain.stage_of_chunk == (0, 1, 0, 1, 0, 1)
    assert [plain.get_stage_from_index(i) for i in range(7)] == [0, 1, 0, 1, 0, 1, 1]
    assert plain.get_num_virtual_stages() == 3
    assert len(plain.get_model_chunks()) == plain.num_chunks == 6
    assert tied(num_stages=3, use_dualpipev=True).stage_of_chunk == (0, 1, 2, 2, 1, 0)
    with pytest.raises(ConfigError, match="there are 7 layers"):
        plain.get_stage_from_index(7)


class Topology:
    def get_dim(self, name):
        return {"pipe": 2}[name]


def test_the_topology_says_the_number_of_stages():
    assert tied(topology=Topology()).num_chunks == 2
    with pytest.raises(ConfigError, match="num_stages=3, but the topology has 2"):
        tied(num_stages=3, topology=Topology())


# building


def test_weights_do_not_depend_on_the_cut_and_the_stream_goes_on():
    rng.seed(5)
    want_next = rng.default_generator.random()
    rng.seed(5)
    one = tied(num_stages=1)
    assert rng.default_generator.random() == want_next
    assert rng.default_generator.initial_seed() == 5
    many = tied(num_stages=3, num_virtual_pipeline_stages=2)
    assert list(one.state_dict()) == list(many.state_dict())
    for name, value in one.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), many.state_dict()[name].numpy())
    rng.seed(1234 + 2)
    np.testing.assert_array_equal(one.state_dict()["2.up.weight"].numpy(), Block(4).up.weight.numpy())


def test_one_key_is_one_layer_with_one_parameter():
    net = tied(num_stages=2)
    assert list(net.shared_layers) == ["embed"]
    assert len(net.parameters()) == 1 + 4 * 2
    shared = net.shared_layers["embed"].weight
    assert [any(p is shared for p in net.chunk(k).parameters()) for k in (0, 1)] == [True, True]
    net(TOKENS).sum().backward()
    # as written out by hand
    alone = tied(num_stages=1)
    x = alone.shared_layers["embed"](TOKENS)
    for i in range(1, 6):
        x = alone._sub_layers[str(i)](x)
    x.matmul(alone.shared_layers["embed"].weight, transpose_y=True).sum().backward()
    np.testing.assert_array_equal(shared.grad.numpy(), alone.shared_layers["embed"].weight.grad.numpy())
    net.allreduce_shared_weight_gradients()
    np.testing.assert_array_equal(shared.grad.numpy(), alone.shared_layers["embed"].weight.grad.numpy())


def test_another_class_of_the_same_key_shares_the_named_weight():
    net = PipelineLayer(
        [SharedLayerDesc("e", Embedding, None, "weight", 6, 4), SharedLayerDesc("e", Head, None, "table", 6, 4)],
        num_stages=2,
    )
    assert list(net.state_dict()) == ["0.weight", "1.table", "1.bias"]
    assert net.state_dict()["0.weight"] is net.state_dict()["1.table"]
    assert len(net.parameters()) == 2


def one_layer_twice(first, second):
    return PipelineLayer([first, second], num_stages=1)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            SharedLayerDesc("e", Embedding, None, "weight", 5, 4),
            r"Embedding\(6, 4\) and Embedding\(5, 4\) stand for one",
        ),
        (SharedLayerDesc("e", Head, None, "table", 5, 4), r"weight of Embedding.*\[6, 4\].*table of Head.*\[5, 4\]"),
        (SharedLayerDesc("e", Head, None, "weight", 6, 4), r"Head\(6, 4\) has no parameter 'weight'.*'table', 'bias'"),
        (SharedLayerDesc("e", Head, None, ["table", "bias"], 6, 4), r"name as many of one as of the other"),
    ],
)
def test_weights_that_cannot_be_shared_are_refused(second, message):
    with pytest.raises(ConfigError, match=message):
        PipelineLayer([SharedLayerDesc("e", Embedding, None, "weight", 6, 4), second], num_stages=1)


# running


def test_chunk_after_chunk_is_the_whole():
    net = tied(num_stages=2, num_virtual_pipeline_stages=2)
    x = TOKENS
    for k in range(net.num_chunks):
        x = net(x, chunk_id=k)
    np.testing.assert_array_equal(x.numpy(), net(TOKENS).numpy())
    assert sum(len(net.chunk_items(k)) for k in range(net.num_chunks)) == 7
    first = net(TOKENS, chunk_id=0)
    np.testing.assert_array_equal(first.numpy(), net(TOKENS, chunk_id=0).numpy())


def test_layers_pass_tuples_and_dicts():
    net = PipelineLayer(
        [Linear(4, 4), lambda x: (x, None, 3), lambda x: {"sum": x[0] * x[2]}, lambda x: x["sum"]], num_stages=4
    )
    x = to_tensor(np.ones((2, 4), "float32"))
    np.testing.assert_array_equal(net(x).numpy(), 3 * net(x, chunk_id=0).numpy())


def test_train_and_eval_reach_every_chunk_and_losses_stay_outside():
    loss = CrossEntropyLoss()
    net = PipelineLayer([Linear(2, 2), Dropout(0.5)], num_stages=2, loss_fn=loss)
    assert net.loss_fn is loss
    net.eval()
    assert not any(layer.training for k in (0, 1) for layer in net.chunk(k).sublayers())
    assert list(net.state_dict()) == ["0.weight", "0.bias"]
    assert PipelineLayer([ReLU()], 1, loss_fn=[loss, relu]).loss_fn == [loss, relu]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("ctx", [None, {"mp_group": None, "offload": True, "partition": True}])
@pytest.mark.parametrize("captured", [False, True])
def test_recomputing_gives_the_same_gradients_with_dropout(ctx, captured):
    gradients = []
    for interval in (0, 2, 3):
        calls = []
        layers = [
            LayerDesc(Block, 4),
            LayerDesc(Dropout, 0.5),
            lambda x, calls=calls: calls.append(1) or (x, x),
            add,
            LayerDesc(Block, 4),
        ]
        net = PipelineLayer(layers, num_stages=1, recompute_interval=interval, recompute_ctx=ctx)

        def step(net=net):
            net(to_tensor(np.ones((2, 4), "float32"))).sum().backward()

        rng.seed(9)
        (to_static(step) if captured else step)()
        gradients.append([p.grad.numpy() for p in net.parameters()])
        if not captured:
            assert len(calls) == (1 if interval == 0 else 2)
    for other in gradients[1:]:
        for a, b in zip(other, gradients[0], strict=True):
            # a captured step with other parts may add some 16 terms below 4 in another order
            np.testing.assert_allclose(a, b, rtol=0, atol=64 * 2.0**-24 if captured else 0)


def add(pair):
    return pair[0] + pair[1]


# files


def test_files_are_read_under_another_cut(tmp_path):
    saved = tied(num_stages=2, num_virtual_pipeline_stages=2)
    for p in saved.parameters():
        p.set_value(np.random.default_rng(p.size).normal(size=p.shape).astype("float32"))
    saved.save_state_dict(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        f"layer_0{i}-virtual_pp_stage_0{v}-tensor_00-model_states.pdparams" for i, v in enumerate((0, 0, 0, 1, 1))
    ]
    loaded = tied(num_stages=3)
    loaded.set_state_dir(tmp_path)
    for name, value in saved.state_dict().items():
        np.testing.assert_array_equal(loaded.state_dict()[name].numpy(), value.numpy())
    plain = tmp_path / "plain"
    loaded.save_state_dict(plain)
    assert (plain / "layer_04-tensor_00-model_states.pdparams").exists()


def test_a_folder_that_does_not_fit_changes_nothing(tmp_path):
    tied(num_stages=2).save_state_dict(tmp_path)
    net = tied(num_stages=2)
    net.parameters()[0].set_value(np.zeros((6, 4), "float32"))
    (tmp_path / "layer_03-tensor_00-model_states.pdparams").rename(
        tmp_path / "layer_03-tensor_01-model_states.pdparams"
    )
    with pytest.raises(CheckpointError, match=r"layer 3 needs one file.*layer_03-tensor_01"):
        net.set_state_dir(tmp_path)
    (tmp_path / "layer_00-tensor_00-model_states.pdparams").replace(
        tmp_path / "layer_03-tensor_00-model_states.pdparams"
    )
    (tmp_path / "layer_03-tensor_01-model_states.pdparams").rename(
        tmp_path / "layer_00-tensor_00-model_states.pdparams"
    )
    with pytest.raises(CheckpointError, match=r"holds \['up.bias', 'up.weight'\], but layer 0 \(Embedding\)"):
        net.set_state_dir(tmp_path)
    assert not net.parameters()[0].numpy().any()
