"""Parameters of Layers of one structure that are one: each Layer's own as an entry of it."""

import copy

import numpy as np
import pytest

import polyreme as paddle
from polyreme import amp, nn
from polyreme.distributed.fsdp import fully_shard
from polyreme.errors import ConfigError, GradError, PlacementError
from polyreme.nn.parameter_entry import ParameterEntry, put_together


def pair():
    paddle.seed(4)
    layers = nn.LayerList([nn.Linear(2, 3) for _ in range(3)])
    assert put_together(list(layers), "expert")
    return layers


def test_a_whole_is_what_is_trained_and_entries_what_is_saved():
    layers = pair()
    assert {name: tuple(p.shape) for name, p in layers.named_parameters()} == {
        "*.weight": (3, 2, 3),
        "*.bias": (3, 3),
    }
    assert layers.parameters()[0].dims == ("expert", *nn.Linear(2, 3).weight.dims)
    assert list(layers.state_dict()) == [f"{i}.{kind}" for i in range(3) for kind in ("weight", "bias")]
    # a Layer alone has its own
    assert [tuple(p.shape) for p in layers[1].parameters()] == [(2, 3), (3,)]
    paddle.seed(4)
    for entry, apart in zip(layers, [nn.Linear(2, 3) for _ in range(3)], strict=True):
        np.testing.assert_array_equal(entry.weight.numpy(), apart.weight.numpy())


def test_an_entry_reads_and_writes_its_whole():
    layers = pair()
    whole, held = layers.parameters()[0], layers[1].weight
    whole.set_value(whole * 2)
    np.testing.assert_array_equal(held.numpy(), whole.numpy()[1])
    held.set_value(np.ones((2, 3), "float32"))
    with pytest.raises(GradError, match="in-place change of a leaf"):
        layers[2].weight.zero_()
    with paddle.no_grad():
        layers[2].weight.zero_()
    layers.set_state_dict({"0.weight": np.full((2, 3), 5.0, "float32")})
    np.testing.assert_array_equal(whole.numpy(), np.broadcast_to(np.float32([5, 1, 0])[:, None, None], (3, 2, 3)))
    copied = copy.deepcopy(layers)
    copied[0].weight.set_value(np.zeros((2, 3), "float32"))
    assert (copied.parameters()[0].numpy()[0] == 0).all()
    assert (whole.numpy()[0] == 5).all()


@pytest.mark.parametrize("captured", [False, True])
def test_gradients_of_an_entry_reach_its_whole(captured):
    layers = pair()

    def loss(x):
        return (layers[1](x) ** 2).sum() + layers[0].weight.sum()

    x = paddle.ones([4, 2])
    (paddle.jit.to_static(loss) if captured else loss)(x).backward()
    weight, bias = layers[1].weight.numpy(), layers[1].bias.numpy()
    want = np.stack([np.ones((2, 3)), np.full((2, 3), 8) * (weight.sum(0) + bias), np.zeros((2, 3))])
    np.testing.assert_allclose(layers.parameters()[0].grad.numpy(), want, rtol=1e-5)
    np.testing.assert_allclose(layers[1].weight.grad.numpy(), want[1], rtol=1e-5)


def test_captured_code_writes_an_entry():
    layers = pair()
    bias = layers[2].bias

    @paddle.jit.to_static
    def step():
        bias.set_value(bias + 1)
        return bias.sum().detach()

    assert [step().item(), step().item()] == [3.0, 6.0]
    np.testing.assert_array_equal(layers.parameters()[1].numpy(), [[0] * 3, [0] * 3, [2] * 3])


def test_casts_are_of_all_entries():
    layers = pair()
    masters = layers.parameters()[0].numpy()
    optimizer = paddle.optimizer.SGD(1.0, parameters=layers.parameters())
    layers, optimizer = amp.decorate(layers, optimizer, level="O2", dtype="bfloat16")
    assert {str(p.dtype) for p in layers.parameters()} == {"bfloat16"}
    layers[0](paddle.ones([1, 2], "bfloat16")).sum().backward()
    optimizer.step()
    names = {id(p): n for n, p in layers.named_parameters()}
    kept = next(a for n, a in optimizer.state_arrays(names).items() if "*.weight" in n and a.shape == (3, 2, 3))
    assert kept.dtype == "float32"
    np.testing.assert_array_equal(np.asarray(kept)[1:], masters[1:])  # and not what 16 bits made of them
    assert {str(p.dtype) for p in layers.float().parameters()} == {"float32"}


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: paddle.optimizer.Lamb(0.1, parameters=parameters),
        lambda parameters: paddle.optimizer.Momentum(
            0.1, 0.9, parameters=parameters, grad_clip=nn.ClipGradByNorm(0.01), weight_decay=0.1
        ),
    ],
    ids=["lamb", "clip by norm"],
)
def test_norms_are_those_of_each_entry(make):
    paddle.seed(4)
    apart = nn.LayerList([nn.Linear(2, 3) for _ in range(3)])
    trained = []
    for layers in (apart, pair()):
        optimizer = make(layers.parameters())
        for _ in range(2):
            sum((n + 1) * (layer(paddle.ones([4, 2])) ** 2).sum() for n, layer in enumerate(layers)).backward()
            optimizer.step()
            optimizer.clear_grad()
        trained.append([value.numpy() for value in layers.state_dict().values()])
    # two steps of sums of 6 terms
    for one, other in zip(*trained, strict=True):
        np.testing.assert_allclose(other, one, rtol=2 * 6 * 4 * 2.0**-23)


def test_lazily_they_are_drawn_as_they_would_have_been():
    def make():
        paddle.seed(7)
        return nn.LayerList([nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)) for _ in range(3)])

    want = make().state_dict()
    with paddle.LazyGuard():
        lazily = make()
        assert put_together(list(lazily), "expert")
    for p in reversed(lazily.parameters()):
        p.initialize()
    for name, entry in lazily.state_dict().items():
        np.testing.assert_array_equal(entry.numpy(), want[name].numpy())


def test_what_is_not_one_stays_apart():
    shared = [nn.Linear(2, 2), nn.Linear(2, 2)]
    shared[1].weight = shared[0].weight
    frozen = [nn.Linear(2, 2), nn.Linear(2, 2)]
    frozen[1].weight.stop_gradient = True
    for layers in ([nn.Linear(2, 2), nn.Linear(2, 3)], shared, frozen, [nn.Linear(2, 2), nn.LayerNorm(2)]):
        assert not put_together(layers, "expert")
        assert not any(isinstance(p, ParameterEntry) for layer in layers for p in layer.parameters())


def test_what_is_of_all_entries_is_refused_for_one():
    layers = pair()
    with pytest.raises(
        ConfigError, match=r"stop_gradient=True of 'linear.*entry 1 of one parameter of shape \[3, 2, 3\]"
    ):
        layers[1].weight.stop_gradient = True
    with pytest.raises(ConfigError, match=r"AdamW: .* is an entry of one parameter of shape \[3, 2, 3\]"):
        paddle.optimizer.AdamW(parameters=layers[0].parameters())
    with pytest.raises(ConfigError, match="register_hook of"):
        layers[0].weight.register_hook(lambda g: g)
    with pytest.raises(PlacementError, match="is an entry of one parameter"):
        fully_shard(layers[0], paddle.distributed.ProcessMesh([0, 1], ["dp"]))
    layers.requires_grad_(False)
    assert layers[1].weight.stop_gradient
