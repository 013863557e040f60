"""On several virtual devices a program has ended when its call returns, though an input was still on its way."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import polyreme as paddle
from polyreme.core.engine.turns import turns
from polyreme.eager.tensor import Tensor
from polyreme.jit.called import Called

SHARDING = NamedSharding(Mesh(np.array(jax.devices()[:4]), "x"), PartitionSpec(None, "x"))


def on_its_way():
    """A square, spread over four devices by copies that nobody waited for."""
    whole = jax.device_put(np.ones((1024, 1024), np.float32), jax.devices()[7])
    return jax.device_put(whole, SHARDING)


def squared(x):
    return x @ x


@pytest.mark.parametrize(
    "call",
    [
        lambda array: (Tensor(array) @ Tensor(array))._array,
        lambda array: paddle.jit.to_static(squared)(Tensor(array))._array,
        Called(squared),
    ],
    ids=["eager", "captured", "chunk"],
)
def test_a_call_returns_when_its_program_has_ended(call):
    assert turns.are_taken
    call(on_its_way())  # compiled
    for _ in range(3):
        assert call(on_its_way()).is_ready()


def test_gradients_are_there_when_backward_returns():
    x = Tensor(on_its_way(), stop_gradient=False)
    squared(x).sum().backward()
    assert x.grad._array.is_ready()


def test_no_tracer_is_waited_for(monkeypatch):
    # its AttributeError tells where it comes from, which takes longer the more was traced before it
    asked, attribute = [], jax.core.Tracer.__getattr__
    monkeypatch.setattr(jax.core.Tracer, "__getattr__", lambda self, name: asked.append(name) or attribute(self, name))

    def gradient(x):
        squared(squared(x).tanh()).sum().backward()
        return x.grad

    x = Tensor(jax.device_put(np.ones((4, 4), np.float32), SHARDING), stop_gradient=False)
    assert paddle.jit.to_static(gradient)(x).shape == [4, 4]
    assert asked
    assert "block_until_ready" not in asked
