"""A captured step over eight virtual devices keeps its layouts, compiles once, and equals one device."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import polyreme as paddle
from polyreme.core.rng import default_generator
from polyreme.eager.tensor import to_tensor
from polyreme.jit import to_static
from polyreme.nn import Linear
from polyreme.optimizer import AdamW

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


def train(place):
    paddle.seed(0)
    layer = Linear(8, 8)
    layer.weight.set_value(np.eye(8, dtype=np.float32))
    place(layer)
    optimizer = AdamW(0.1, parameters=layer.parameters())

    @to_static
    def step(x):
        loss = ((layer(x) + paddle.rand([4, 8])) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    losses = []
    for i in range(3):
        optimizer.set_lr(0.1 / (i + 1))
        losses.append(step(to_tensor(X)).item())
    return losses, layer, step


@pytest.fixture
def own_generator():
    """The key moves onto the mesh; later tests get theirs back where it was."""
    holder = default_generator.key_state()
    before = holder._array + 0
    yield
    holder._array = before


def test_a_differentiable_forward_compiles_once(own_generator):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    layer = Linear(8, 8)
    layer.weight._array = jax.device_put(layer.weight._array, NamedSharding(mesh, PartitionSpec("x")))
    forward = to_static(lambda x: layer(x) + paddle.rand([4, 8]))
    for _ in range(3):
        forward(to_tensor(X)).sum().backward()
        layer.clear_gradients(set_to_zero=False)
    (program,) = forward.concrete_programs()
    assert [jitted._cache_size() for jitted in program._kernel._derived.values()] == [1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("devices", [8, 1])
def test_layouts_stay_and_nothing_recompiles(own_generator, devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    rows, everywhere = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())

    def place(layer):
        layer.weight._array = jax.device_put(layer.weight._array, rows)
        layer.bias._array = jax.device_put(layer.bias._array, everywhere)

    losses, layer, step = train(place)
    one_device, _, _ = train(lambda layer: None)
    assert layer.weight.sharding == rows
    (program,) = step.concrete_programs()
    assert program._jitted._cache_size() == 1
    # sums of 32 float32 terms, in another order, through 3 steps
    assert losses == pytest.approx(one_device, rel=3 * 32 * float(np.finfo(np.float32).eps))
