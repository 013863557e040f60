"""The fuzzer draws the same calls for the same seed, makes them in every way, and tells findings from refusals."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from tests.oracle import fuzz
from tests.oracle.calls import Call, op_calls
from tests.oracle.side import Side, decoded, encoded

X = np.float32([[1, 2], [3, 4]])
CALL = Call("paddle.nn.functional.linear", "row", (X, X.T))


@pytest.fixture(scope="module")
def rows():
    return list(islice(op_calls(), 300))


def drawn(rows, seed, count=200):
    rng = np.random.default_rng(seed)
    return [fuzz.changed(rows[rng.integers(len(rows))], rng) for _ in range(count)]


def test_a_seed_draws_the_same_calls_again(rows):
    first, second = (drawn(rows, seed=3) for _ in range(2))
    assert [repr(call) for call in first] == [repr(call) for call in second]
    assert [repr(call) for call in first] != [repr(call) for call in drawn(rows, seed=4)]
    changed = [call for call in first if not call.tag.endswith(fuzz.CHANGED)]
    assert len(changed) > 0.9 * len(first)


@pytest.mark.parametrize("way", fuzz.WAYS)
@pytest.mark.parametrize("aliased", [False, True])
def test_every_way_of_making_a_call_gives_its_result(way, aliased):
    args = (X, X) if aliased else CALL.args
    told = Side("polyreme").outcome(replace(CALL, args=args, way=way, aliased=aliased, grad=way != "program").message())
    np.testing.assert_array_equal(decoded(told["outs"][0]), args[0] @ args[1])
    if way != "program":
        # one leaf where the Tensor was given twice
        assert len(told["grads"]) == 2 - aliased


def test_methods_are_called_in_every_way():
    call = Call("Tensor.add", "row", (X, X.T), grad=False)
    for way in fuzz.WAYS:
        told = Side("polyreme").outcome(replace(call, way=way).message())
        np.testing.assert_array_equal(decoded(told["outs"][0]), X + X.T)


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
