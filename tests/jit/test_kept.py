"""Tensors that captured code leaves in attributes, globals, lists and dicts: captured equals eager, call after call."""

import logging

import numpy as np
import pytest

from polyreme import nn
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CaptureError
from polyreme.jit import to_static
from polyreme.ops.creation import arange

TABLES, LOSSES = {}, []


class Cached(nn.Layer):
    """A table made when it is first wanted, again for longer inputs, and one for each length."""

    def __init__(self):
        super().__init__()
        self.table, self.longest, self.by_length = None, 0, {}

    def forward(self, x):
        length = x.shape[0]
        if self.table is None or length > self.longest:
            self.longest = length
            self.table = arange(length).astype("float32") * 2
        if length not in self.by_length:
            self.by_length[length] = self.table + 1
        self.seen = x * 3
        return x * self.table[:length] + self.by_length[length]


class Recurrent(nn.Layer):
    """A state that each call takes on from the last one's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2, weight_attr=nn.initializer.Constant(0.25))
        self.state = None

    def forward(self, x):
        if not hasattr(self, "first"):
            self.first = x * 1
        self.state = self.linear(x) if self.state is None else self.state.detach() * 0.5 + self.linear(x)
        self.features = []
        self.features.append(self.state * 2)
        return self.state + self.first


class LazyBuffer(nn.Layer):
    """A buffer registered on the first call, and one that grows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("grown", arange(1).astype("float32"))

    def forward(self, x):
        if "made" not in self._buffers:
            self.register_buffer("made", x * 0 + 4)
        if self.grown.shape[0] < x.shape[0]:
            self.grown = arange(x.shape[0]).astype("float32")
        return x + self.made[:1] + self.grown[: x.shape[0]]


def values(holder):
    """Every Tensor that a layer holds, by where."""

    def walk(path, value):
        if isinstance(value, dict):
            for key, part in value.items():
                yield from walk(f"{path}.{key}", part)
        elif isinstance(value, list):
            yield from walk(path, dict(enumerate(value)))
        elif hasattr(value, "numpy"):
            yield path, value.numpy()

    return dict(walk("", {k: v for k, v in vars(holder).items() if k not in ("forward", "_sub_layers")}))


@pytest.mark.parametrize(
    ("layer", "lengths", "programs"),
    [(Cached, (3, 3, 5, 3, 5, 3), 6), (LazyBuffer, (2, 2, 3, 2), 4), (Recurrent, (2, 2, 2, 2), 2)],
)
def test_what_a_forward_keeps_is_what_eager_code_keeps(layer, lengths, programs):
    eager, captured = layer(), layer()
    forward = to_static(captured).forward
    for number, length in enumerate(lengths):
        x = np.arange(length, dtype="float32") + number
        results = [net(to_tensor(x)) for net in (eager, captured)]
        np.testing.assert_array_equal(*(r.numpy() for r in results))
        if not results[0].stop_gradient:
            for net, result in zip((eager, captured), results, strict=True):
                result.sum().backward()
                assert net.linear.weight.grad is not None
                net.linear.clear_gradients()
        wanted, got = values(eager), values(captured)
        assert list(wanted) == list(got)
        for path in wanted:
            np.testing.assert_array_equal(got[path], wanted[path], err_msg=path)
    assert len(forward.retraces) <= programs, forward.retraces


def test_globals_keep_tensors_and_an_error_leaves_things_as_they_were():
    @to_static
    def scaled(x, fails=False):
        if "scale" not in TABLES:
            TABLES["scale"] = x * 0 + 2
        if fails:
            raise ValueError("not today")
        return x * TABLES["scale"]

    with pytest.raises(ValueError, match="not today"):
        scaled(to_tensor([3.0]), True)
    assert TABLES == {}
    assert scaled(to_tensor([3.0])).item() == 6
    assert TABLES["scale"].tolist() == [2]
    TABLES["scale"] = to_tensor([5.0])
    assert scaled(to_tensor([3.0])).item() == 15
    TABLES.clear()


def test_a_number_that_counts_beside_them_is_refused_once_nothing_new_is_kept():
    class Counts(nn.Layer):
        table, calls = None, 0

        def forward(self, x):
            self.calls += 1
            if self.table is None:
                self.table = x * 0
            return x + self.calls + self.table

    net = to_static(Counts())
    assert net(to_tensor(1.0)).item() == 2
    assert net.calls == 1
    with pytest.raises(CaptureError, match=r"Counts\.calls goes from . to . each time"):
        net(to_tensor(1.0))
    assert net.calls == 1


def test_a_list_that_grows_at_each_call_is_named_once(caplog):
    @to_static
    def step(x):
        LOSSES.append(x * 2)
        return x + 1

    with caplog.at_level(logging.WARNING, "polyreme.jit"):
        for call in range(6):
            step(to_tensor([float(call)]))
    assert [loss.item() for loss in LOSSES] == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "LOSSES has more Tensors after each call" in warning
    assert "append what the call gives outside" in warning
