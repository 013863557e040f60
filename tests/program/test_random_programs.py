"""Random programs give equal results run eagerly, captured, recorded into a Program, and exported."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme import static
from polyreme.core import unique_name

FLOATS = ("float32", "float64", "complex64")
SIZES = (1, 2, 3)

# an op's largest gain: how much it can enlarge an error in its inputs, all of which are at most 2 in size
UNARY = {
    "tanh": (paddle.tanh, 1),
    "sin": (paddle.sin, 4),
    "square": (lambda x: x * x * 0.25, 1),
    "half": (lambda x: x / 2, 1),
    "negated": (lambda x: -x, 1),
    "mean": (lambda x: x.mean(-1, keepdim=True), 1),
    "sum": (lambda x: x.sum(0, keepdim=True) / 3, 1),
    "transposed": (lambda x: paddle.transpose(x, list(range(x.ndim))[::-1]), 1),
    "flat": (lambda x: paddle.reshape(x, [-1]), 1),
    "row": (lambda x: x[0:1], 1),
    "column": (lambda x: x[..., -1:], 1),
    "twice": (lambda x: paddle.concat([x, x * 0.5], 0)[1:], 1),
    "cumulated": (lambda x: paddle.cumsum(x, -1) / max(x.shape[-1], 1), 1),
    "flipped": (lambda x: paddle.flip(x, [0]), 1),
}
REAL = {
    "sigmoid": (F.sigmoid, 1),
    "softmax": (lambda x: F.softmax(x, -1), 1),
    "relu": (F.relu, 1),
    "largest": (lambda x: x.max(0, keepdim=True), 1),
    "sorted": (lambda x: paddle.sort(x, -1), 1),
    "integers": (lambda x: paddle.cast(paddle.floor(paddle.ones_like(x) * 2), "int64"), 0),
    "double": (lambda x: paddle.cast(x, "float64"), 1),
}
BINARY = {
    "sum": (lambda x, y: (x + y) * 0.5, 1),
    "difference": (lambda x, y: (x - y) * 0.5, 1),
    "product": (lambda x, y: x * y * 0.5, 2),
    "matmul": (lambda x, y: paddle.matmul(x, y, transpose_y=True) * (0.5 / max(x.shape[-1], 1)), 2),
    "chosen": (lambda x, y: paddle.where(x.abs() >= 0, x, y), 1),
}


@dataclass(frozen=True)
class Step:
    """op on values picked from those there are; those it cannot take are passed by."""

    op: int
    first: int
    second: int


def apply(steps, inputs):
    """(the values, an upper bound on how much an error of 1 rounding has grown by)."""
    values, gains = list(inputs), [1.0] * len(inputs)
    for step in steps:
        index, other = step.first % len(values), step.second % len(values)
        x, y = values[index], values[other]
        table = list((UNARY if "complex" in str(x.dtype) else UNARY | REAL).values()) + list(BINARY.values())
        fn, gain = table[step.op % len(table)]
        if any(entry[0] is fn for entry in BINARY.values()):
            if not takes(fn, x, y):
                continue
            values.append(fn(x, y))
            gains.append(gain * (gains[index] + gains[other] + 4))
        elif x.ndim and "int" not in str(x.dtype):
            values.append(fn(x))
            gains.append(gain * gains[index] + 4)
    return values[len(inputs) :], gains[len(inputs) :]


def takes(fn, x, y):
    if x.dtype != y.dtype or "int" in str(x.dtype):
        return False
    if fn is BINARY["matmul"][0]:
        return x.ndim == y.ndim == 2 and x.shape[1] == y.shape[1]
    return list(x.shape) == list(y.shape)


steps = st.lists(st.builds(Step, *[st.integers(0, 1000)] * 3), min_size=3, max_size=10)
inputs = st.lists(
    st.tuples(st.sampled_from(FLOATS), st.lists(st.sampled_from(SIZES), min_size=1, max_size=3), st.integers(0, 99)),
    min_size=1,
    max_size=3,
)


def array(dtype, shape, seed):
    draw = np.random.default_rng(seed).uniform(-1, 1, (2, *shape))
    return (draw[0] + 1j * draw[1] if "complex" in dtype else draw[0]).astype(dtype)


def recorded(program, arrays):
    main, startup = static.Program(), static.Program()
    with unique_name.guard(), static.program_guard(main, startup):
        paddle.enable_static()
        try:
            fed = [static.data(f"x{i}", a.shape, str(a.dtype)) for i, a in enumerate(arrays)]
            outs, _ = apply(program, fed)
        finally:
            paddle.disable_static()
    return static.Executor().run(main, {f"x{i}": a for i, a in enumerate(arrays)}, outs)


@pytest.mark.slow
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps, inputs)
def test_four_ways_agree(tmp_path, program, given_inputs):
    arrays = [array(*facts) for facts in given_inputs]
    eager, gains = apply(program, [paddle.to_tensor(a) for a in arrays])
    if not eager:
        return
    captured = paddle.jit.to_static(lambda *xs: apply(program, xs)[0])
    specs = [static.InputSpec(a.shape, str(a.dtype)) for a in arrays]
    paddle.jit.save(captured, str(tmp_path / "program"), input_spec=specs)
    loaded = paddle.jit.load(str(tmp_path / "program"))
    tensors = [paddle.to_tensor(a) for a in arrays]
    others = {
        "captured": captured(*tensors),
        "recorded": recorded(program, arrays),
        "exported": loaded(*tensors),
    }
    for way, found in others.items():
        found = [found] if isinstance(found, paddle.Tensor) else found
        assert len(found) == len(eager), way
        for index, (a, b, gain) in enumerate(zip(found, eager, gains, strict=True)):
            a, b = np.asarray(a), b.numpy()
            assert (a.dtype, a.shape) == (b.dtype, b.shape), (way, index)
            # every value is at most 2 in size, and each of the terms that ops add up (at most 27) rounds once
            eps = np.finfo(b.dtype).eps if b.dtype.kind in "fc" else 0
            np.testing.assert_allclose(a, b, rtol=0, atol=2 * 27 * gain * eps, err_msg=f"{way}, value {index}")
