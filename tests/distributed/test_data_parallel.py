"""DataParallel in one process over eight devices: what it does to a model, and that it trains as one device does.

Between processes: test_processes.py.
"""

import jax
import numpy as np
import pytest

import polyreme
from polyreme import distributed as dist
from polyreme import nn
from polyreme.core import layout as layouts
from polyreme.core import rng
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.optimizer import AdamW

STEPS = 2
# float32 sums of up to 16 x 6 terms in another order, amplified by Adam's division by a root
TOLERANCE = 2.0**-23 * 96 * 64


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    clear_plan()


def network():
    rng.seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))


def train(model, rows=16, capture=False):
    optimizer = AdamW(0.01, parameters=model.parameters())

    def step(x, y):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    run = to_static(step) if capture else step
    rng.seed(11)
    data = np.random.default_rng(0)
    batches = [(data.normal(size=(rows, 6)), data.normal(size=(rows, 2))) for _ in range(STEPS)]
    losses = [float(run(*(to_tensor(b.astype("float32")) for b in batch))) for batch in batches]
    return losses, {name: p.numpy() for name, p in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capture", "rows"), [(False, 16), (True, 16), (False, 12)], ids=["eager", "captured", "uneven"]
)
def test_it_trains_as_one_device_does(capture, rows):
    losses, state = train(dist.DataParallel(network()), rows, capture)
    clear_plan()
    want_losses, want = train(network(), rows, capture)
    np.testing.assert_allclose(losses, want_losses, rtol=TOLERANCE)
    assert list(state) == list(want)
    for name, value in want.items():
        np.testing.assert_allclose(state[name], value, atol=0.01 * TOLERANCE * 64, err_msg=name)


def test_the_batch_is_split_and_the_parameters_are_everywhere():
    model = dist.DataParallel(network())
    seen = []
    model._layers.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    out = model(to_tensor(np.ones((16, 6), "float32")))
    (given,) = seen
    assert {s.data.shape for s in given._array.addressable_shards} == {(2, 6)}
    assert {s.data.shape for s in out._array.addressable_shards} == {(2, 2)}
    for p in model.parameters():
        assert p._array.is_fully_replicated
        assert len(p._array.sharding.device_set) == jax.device_count()
    # nested inputs, other values and 0-D Tensors come as they were given
    nested = nn.Sequential()
    nested.forward = lambda pair, scale, flag=None: (pair["x"][0] * scale, flag)
    out, flag = dist.DataParallel(nested)({"x": [to_tensor(np.ones((8, 1), "float32"))]}, to_tensor(2.0), flag="on")
    assert (out.numpy().sum(), flag) == (16.0, "on")


def test_a_gradient_reaches_the_input():
    x = to_tensor(np.ones((8, 6), "float32"), stop_gradient=False)
    dist.DataParallel(nn.Linear(6, 1))(x).sum().backward()
    assert x.grad.shape == [8, 6]


def test_the_plan_in_force_is_kept():
    model = network()
    layout = apply_plan(Plan.from_degrees(dp=4, sharding=2, sharding_stage=3), model)
    dist.DataParallel(model)
    assert layouts.active.layout is layout
    # a model that lies nowhere yet goes where the plan says
    other = dist.DataParallel(network())
    assert layouts.active.layout.plan == layout.plan
    assert all(p.layouts for p in other.parameters())
    assert other.group.nranks == 1
    assert dist.DataParallel(model, group=dist.axis_group(layout.mesh, "dp")).group.nranks == 4


def test_state_and_the_rest_of_the_interface():
    model = dist.DataParallel(network())
    assert list(model.state_dict()) == list(network().state_dict())
    saved = {name: t.numpy() + 1 for name, t in model.state_dict().items()}
    for load in (model.set_state_dict, model.set_dict, model.load_dict):
        assert load(saved) == ([], [])
    np.testing.assert_array_equal(model.parameters()[0].numpy(), saved["0.weight"])
    assert len(model.parameters()[0]._array.sharding.device_set) == jax.device_count()
    loss = to_tensor(3.0)
    assert model.scale_loss(loss) is loss
    assert model.apply_collective_grads() is None
    with model.no_sync():
        model(to_tensor(np.ones((8, 6), "float32"))).sum().backward()
    assert model.parameters()[0].grad is not None
    assert polyreme.DataParallel is dist.DataParallel


def test_refuses_what_it_cannot_do():
    with pytest.raises(TypeError, match="DataParallel wraps a Layer, got function"):
        dist.DataParallel(network)
    with pytest.raises(ConfigError, match=r"takes none; hand a DistributedStrategy to fleet.init"):
        dist.DataParallel(network(), strategy=1)
    for name in ("comm_buffer_size", "last_comm_buffer_size"):
        with pytest.raises(ConfigError, match=rf"DataParallel\({name}=0\): needs a number of MB above 0"):
            dist.DataParallel(network(), **{name: 0})
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("dp",))
    with pytest.raises(ConfigError, match="a group of mesh axes needs a plan in force"):
        dist.DataParallel(network(), group=dist.axis_group(mesh, "dp"))
