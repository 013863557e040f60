"""A captured training step of a random small network equals the eager one, and control flow of random shape too."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme.eager.tensor import to_tensor
from polyreme.jit import to_static
from polyreme.nn import Linear, Sequential
from polyreme.nn.layer import Layer
from polyreme.optimizer import SGD, AdamW

STEPS = 5


class Act(Layer):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if self.kind == "gated":
            # depends on values: staged when captured
            if x.sum() > 0:
                return x * 0.5
            return x.tanh()
        return x.tanh() if self.kind == "tanh" else x * x


def build(widths, kinds):
    layers = []
    for n_in, n_out, kind in zip(widths, widths[1:], kinds, strict=False):
        layers += [Linear(n_in, n_out), Act(kind)]
    return Sequential(*layers)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=4),
    st.lists(st.sampled_from(["tanh", "square", "gated"]), min_size=3, max_size=3),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_captured_training_equals_eager(widths, kinds, adam, seed):
    rng = np.random.default_rng(seed)
    xs = rng.uniform(-1, 1, (STEPS, 3, widths[0])).astype(np.float32)
    plain, captured = build(widths, kinds), build(widths, kinds)
    captured.set_state_dict(plain.state_dict())
    runs = []
    for net, wrap in ((plain, lambda f: f), (captured, to_static)):
        optimizer = (AdamW if adam else SGD)(0.01, parameters=net.parameters())
        runs.append([float(v) for v in train(net, optimizer, wrap, xs)])
    # each step multiplies rounding by at most the depth times the terms of a row; AdamW's first steps by 1/sqrt(eps)
    terms = STEPS * len(widths) * max(widths) * 3
    rtol = terms * np.finfo(np.float32).eps * (100 if adam else 1)
    np.testing.assert_allclose(runs[1], runs[0], rtol=rtol, atol=rtol)
    for a, b in zip(plain.parameters(), captured.parameters(), strict=True):
        np.testing.assert_allclose(b.numpy(), a.numpy(), rtol=rtol, atol=rtol)


def train(net, optimizer, wrap, xs):
    def step(x):
        loss = (net(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    run = wrap(step)
    return [run(to_tensor(x)) for x in xs]
