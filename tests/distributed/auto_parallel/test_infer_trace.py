"""Recording a model's forward without running it."""

import re

import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.distributed.auto_parallel.dims import trace as tracing
from polyreme.distributed.auto_parallel.dims.trace import trace
from polyreme.errors import CaptureError, ConfigError
from polyreme.hapi import InputSpec


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1D(10)
        self.down = nn.Linear(10, 6, bias_attr=False)
        self.again = self.up

    def forward(self, x):
        hidden = nn.functional.dropout(self.norm(nn.functional.relu(self.up(x))), 0.5)
        return self.down(hidden)


def test_ops_calls_and_values():
    paddle.seed(3)
    net = Net()
    before = {name: value.numpy().copy() for name, value in net.state_dict().items()}
    key = paddle.get_rng_state()
    traced = trace(net, [InputSpec([None, 6], "float32")], [InputSpec([None], "int64")], nn.CrossEntropyLoss(), batch=3)
    assert [op.name for op in traced.ops[:4]] == ["linear", "relu", "batch_norm_train", "dropout_train"]
    assert [op.path for op in traced.ops[:5]] == ["up", "", "norm", "", "down"]
    assert traced.ops[-1].path == "loss"
    assert traced.loss.shape == ()
    assert traced.batch == 3
    assert traced.outputs[0].shape == (3, 6)
    assert traced.inputs[0].shape == (3, 6)
    assert traced.labels[0].shape == (3,)
    assert traced.ops[0].inputs == (traced.inputs[0], traced.parameters["up.weight"], traced.parameters["up.bias"])
    assert traced.ops[0].input_of("weight") is traced.parameters["up.weight"]
    assert traced.ops[0].input_of("other") is None
    assert traced.aliases == {"again.weight": "up.weight", "again.bias": "up.bias"}
    assert traced.outputs[0] in traced.ops[4].outputs
    assert traced.uses()[traced.parameters["down.weight"]] == [traced.ops[4]]
    assert [traced.ops_in(call)[0].name for call in traced.calls if call.path == "down"] == ["linear"]
    assert traced.ops[3].attributes["p"] == 0.5
    assert [v.aval.shape for v in traced.ops[0].jaxpr().jaxpr.outvars] == [(3, 10)]
    # nothing happened: no statistics, no random numbers, no values
    after = net.state_dict()
    assert all(np.array_equal(before[name], after[name].numpy()) for name in before)
    assert repr(key) == repr(paddle.get_rng_state())


def test_nothing_is_allocated():
    with paddle.LazyGuard():
        net = nn.Linear(200_000, 300_000)  # 240 GB
    found = trace(net, [InputSpec([None, 200_000])])
    assert found.outputs[0].shape == (tracing.BATCH, 300_000)


class Branching(nn.Layer):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        x = self.up(x)
        if x.sum() > 0:
            x = x * 2
        return x


class Counting(nn.Layer):
    def forward(self, x):
        return x.nonzero().shape[0] * x.numpy()


def test_control_flow_on_values():
    found = trace(Branching(), [InputSpec([2, 4])])
    assert found.ops[0].name == "linear"
    assert found.outputs[0].shape == (2, 4)
    with pytest.raises(CaptureError, match="needs the value of a Tensor, which tracing does not have"):
        trace(Counting(), [InputSpec([2, 4])])


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match=re.escape("trace: 3 has no shape and dtype")):
        trace(nn.Linear(3, 4), [3])
    with pytest.raises(ConfigError, match="the loss gave no Tensor"):
        trace(nn.Linear(3, 4), [InputSpec([2, 3])], loss=lambda y: None)
    with pytest.raises(CaptureError, match=r"Linear asks for gradients while it is traced .* take hooks"):
        trace(nn.Linear(3, 4), [InputSpec([2, 3])], loss=lambda y: y.register_hook(lambda g: g))
