"""What cannot be cut into stages is refused, and the message says what to change."""

from types import SimpleNamespace

import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.distributed.auto_parallel.layers.split_points import SplitPoint
from polyreme.distributed.auto_parallel.stages.chunks import cut_into_stages
from polyreme.errors import CaptureError, ConfigError
from polyreme.mesh.schedule import Task
from tests.distributed.auto_parallel.one_device import ROWS


class Odd(nn.Layer):
    """Two Linears and something between them, for what is refused."""

    def __init__(self, between=lambda layer, x: x):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1D(4)
        self.between = between

    def forward(self, x):
        return self.second(self.between(self, self.first(x)))


def again(layer, x):
    return paddle.distributed.fleet.utils.recompute(layer.norm, x)


def lazily():
    with paddle.LazyGuard():
        return Odd()


REFUSED = {
    "a hook": (
        lambda: Odd(lambda _, x: x.register_hook(lambda g: g)),
        {},
        CaptureError,
        r"Odd cannot be cut into stages: register_hook.* or describe the model as a PipelineLayer",
    ),
    "no Layer": (lambda: abs, {}, TypeError, "takes a Layer, got builtin_function_or_method"),
    "no values": (lazily, {}, ConfigError, "made under LazyGuard and has no value yet"),
    "no chunks": (Odd, {"chunks": 0}, ConfigError, "chunks=0"),
    "a name": (Odd, {"at": "first"}, ConfigError, "at='first'; give a list"),
    "a beginning": (Odd, {"at": {"first": SplitPoint.BEGINNING}}, ConfigError, "cut at the end of a layer"),
    "too many cuts": (Odd, {"at": ["first", "second"]}, ConfigError, "2 cuts, .* for 2 chunks; give 1"),
    "a wrong name": (Odd, {"at": ["frist"]}, ConfigError, "'frist', which its forward .*did you mean 'first'"),
    "the end": (Odd, {"at": ["second"]}, ConfigError, "leave a chunk nothing to run: 'second' after 2"),
    "recomputed": (
        lambda: Odd(again),
        {"at": ["norm"]},
        ConfigError,
        "'norm', which lies in a branch",
    ),
    "too few layers": (
        lambda: nn.Linear(4, 4),
        {},
        ConfigError,
        "calls 0 Layers .* into 2",
    ),
    "open sizes": (Odd, {"inputs": paddle.static.InputSpec([None, 4])}, ConfigError, "leaves a size open"),
    "an object": (Odd, {"inputs": object()}, ConfigError, "hold <object .*; give Tensors"),
    "a namedtuple": (Odd, {"inputs": Task("F", ROWS, 0)}, ConfigError, "hold a Task"),
    "values": (
        lambda: Odd(lambda _, x: x * float(x.sum())),
        {},
        CaptureError,
        "Odd cannot be cut .*float.* masked_fill",
    ),
    "new parameters": (
        lambda: Odd(lambda _, x: nn.Linear(4, 4)(x)),
        {},
        ConfigError,
        "makes parameters in its",
    ),
    "gradients": (
        lambda: Odd(lambda layer, x: paddle.static.gradients([x.sum()], [layer.first.weight])[0]),
        {},
        ConfigError,
        "which no stage can run; take gradients",
    ),
    "a buffer of two": (
        lambda: Odd(lambda layer, x: layer.norm(layer.second(layer.norm(x)))),
        {"at": ["second"]},
        ConfigError,
        r"changes a buffer of shape \[4\] that chunks 0 and 1",
    ),
    "backwards": (
        Odd,
        {"at": SimpleNamespace(chunks_of=lambda _: [1, 0])},
        ConfigError,
        "'linear' on chunk 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused(case):
    model, given, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        cut_into_stages(model(), **{"inputs": ROWS, "chunks": 2, **given})
