"""The fuzzer draws the same calls for the same seed, makes them in every way, and tells findings from refusals."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from tests.oracle import fuzz, mutations, side
from tests.oracle.calls import Call, op_calls
from tests.oracle.side import Made, Side, decoded, encoded

X = np.float32([[1, 2], [3, 4]])
CALL = Call("paddle.nn.functional.linear", "row", (X, X.T))


@pytest.fixture(scope="module")
def rows():
    return list(islice(op_calls(), 300))


def drawn(rows, seed, count=200):
    rng = np.random.default_rng(seed)
    return [mutations.changed(rows[rng.integers(len(rows))], rng) for _ in range(count)]


def test_a_seed_draws_the_same_calls_again(rows):
    first, second = (drawn(rows, seed=3) for _ in range(2))
    assert [repr(call) for call in first] == [repr(call) for call in second]
    assert [repr(call) for call in first] != [repr(call) for call in drawn(rows, seed=4)]
    changed = [call for call in first if not call.tag.endswith(mutations.CHANGED)]
    assert len(changed) > 0.9 * len(first)


@pytest.mark.parametrize("way", fuzz.WAYS)
@pytest.mark.parametrize("aliased", [False, True])
def test_every_way_of_making_a_call_gives_its_result(way, aliased):
    args = (X, X) if aliased else CALL.args
    eager = way in ("eager", "captured")
    told = Side("polyreme").outcome(replace(CALL, args=args, way=way, aliased=aliased, grad=eager).message())
    np.testing.assert_array_equal(decoded(told["outs"][0]), args[0] @ args[1])
    if eager:
        # one leaf where the Tensor was given twice
        assert len(told["grads"]) == 2 - aliased


def test_methods_are_called_in_every_way():
    call = Call("Tensor.add", "row", (X, X.T), grad=False)
    for way in fuzz.WAYS:
        told = Side("polyreme").outcome(replace(call, way=way).message())
        np.testing.assert_array_equal(decoded(told["outs"][0]), X + X.T)


def test_methods_that_change_their_tensor_give_it_too():
    call = Call("Tensor.add_", "row", (X, X.T), grad=False)
    for way in fuzz.WAYS:
        told = Side("polyreme").outcome(replace(call, way=way).message())
        assert [decoded(a).tolist() for a in told["outs"]] == [(X + X.T).tolist()] * 2


@pytest.mark.parametrize("how", side.VIEWS)
def test_views_have_the_values_of_the_array(how):
    call = Call("paddle.assign", "row", (side.View(X, how),), grad=True)
    told = Side("polyreme").outcome(call.message())
    np.testing.assert_array_equal(decoded(told["outs"][0]), X)
    # the gradient is that of the whole Tensor
    assert np.count_nonzero(decoded(told["grads"][0])) == X.size


def test_layers_and_optimizers_do_the_same_in_every_way():
    linear = Call("paddle.nn.Linear", "row", (X,), layer={"args": [2, 3], "kwargs": {}}, grad=False)
    clip = Made("nn.ClipGradByNorm", (0.5,))
    layer = {"args": [], "kwargs": {"learning_rate": 0.5, "grad_clip": clip}, "steps": 2}
    sgd = Call("paddle.optimizer.SGD", "row", ([X], [X]), layer=layer, grad=False)
    for call, ways, shape in ((linear, fuzz.WAYS[:3], (2, 3)), (sgd, fuzz.WAYS[:3], (2, 2))):
        results = [decoded(Side("polyreme").outcome(replace(call, way=way).message())["outs"][0]) for way in ways]
        assert results[0].shape == shape
        for result in results[1:]:
            np.testing.assert_allclose(result, results[0], rtol=1e-6)
    np.testing.assert_allclose(results[0], X - 2 * 0.5 * 0.5 * X / np.linalg.norm(X), rtol=1e-6)


def outs(*values):
    return {"outs": [encoded(np.float32(v)) for v in values]}


JUDGED = {
    "same": ({}, []),
    "number": ({"captured": outs(2)}, ["captured is not eager"]),
    "refused on purpose": ({"captured": {"error": "CaptureError: reads a value"}}, []),
    "refused": ({"program": {"error": "ShapeError: f: x [2]"}}, ["program: refuses what eager takes"]),
    "untyped": ({"eager": {"error": "AssertionError: "}}, ["eager: AssertionError"]),
    "not expected": ({"eager": {"error": "TypeError: 'int' object is not iterable"}}, ["eager: TypeError"]),
    "typed": ({"eager": {"error": "DTypeError: f: x is bool; needs a number"}}, []),
    "ended": ({"eager": {"error": "the process ended in this call"}}, ["eager: process"]),
    "PaddlePaddle": ({"paddle": outs(3)}, ["differs from PaddlePaddle"]),
}


@pytest.mark.parametrize("name", JUDGED)
def test_findings_are_told_from_refusals(name):
    changes, kinds = JUDGED[name]
    ways = {**{way: outs(1) for way in fuzz.WAYS}, **changes}
    assert [finding.kind for finding in fuzz.judged(CALL, ways)] == kinds
