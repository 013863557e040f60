"""The differential run: every difference from PaddlePaddle has a reason. `make oracle` writes the report."""

import os
import sys

import numpy as np
import pytest

from tests.oracle import compare, report, run
from tests.oracle.calls import Call, all_calls
from tests.oracle.side import Side, decoded, encoded

PADDLE = os.environ.get("POLYREME_TEST_PADDLE_PYTHON")


@pytest.mark.oracle
@pytest.mark.timeout(7200)
@pytest.mark.skipif(PADDLE is None, reason="POLYREME_TEST_PADDLE_PYTHON names no interpreter with paddlepaddle")
def test_every_difference_has_a_reason(tmp_path):
    calls = all_calls()
    pairs = run.both(PADDLE, calls, tmp_path)
    findings = [compare.compared(c, *p) for c, p in zip(calls, pairs, strict=True)]
    report.PAGE.write_text(report.page(findings))
    assert [f"{f.call.id}: {f.what}" for f in report.unexplained(findings)] == []
    assert compare.unused(findings, compare.documented()) == [], "take these out of differences.txt"


def test_what_is_sent_arrives():
    for value in (np.arange(6.0).reshape(2, 3).T, (1, [2.5, None]), {"a": np.dtype("int8")}, 1 + 2j, slice(1, None, 2)):
        got = decoded(encoded(value))
        np.testing.assert_equal(got, value)
        assert type(got) is type(value)
    with pytest.raises(TypeError, match="a function cannot be sent"):
        encoded(lambda x: x)


def outcome(path, *args, **more):
    call = Call(path, "here", args, **more)
    return call, Side("polyreme").outcome(call.message())


def test_one_side_equals_itself_and_a_changed_result_differs():
    call, told = outcome("paddle.multiply", np.float32([1, 2]), np.float32([3, 4]))
    assert [decoded(a).tolist() for a in told["outs"]] == [[3, 8]]
    assert compare.compared(call, told, told).kind == compare.AGREE
    for part in ("outs", "grads"):
        other = {**told, part: [encoded(np.float32([3, 9])), *told[part][1:]]}
        assert compare.compared(call, told, other).kind == compare.DIFFER


def test_a_pattern_that_explains_nothing_is_named():
    call, told = outcome("paddle.multiply", np.float32([1, 2]), np.float32([3, 4]))
    differs = compare.compared(call, {"error": "ShapeError: no"}, told)
    known = [
        ("paddle.multiply:*", "raises *", "why"),
        ("paddle.multiply:here", "*", "comes second"),
        ("paddle.add:*", "*", "no such call"),
        ("paddle.multiply:*", "shape *", "no such difference"),
    ]
    assert compare.explanation(differs, known) == "why"
    assert compare.unused([differs, compare.compared(call, told, told)], known) == [
        "paddle.multiply:here",
        "paddle.add:*",
        "paddle.multiply:* | shape *",
    ]


@pytest.mark.parametrize(("ours", "theirs", "kind"), [(0, 1, "WIDER"), (1, 0, "DIFFER"), (1, 1, "BOTH_RAISE")])
def test_errors_are_compared(ours, theirs, kind):
    call, told = outcome("paddle.abs", np.float32([-1.0]))
    refused = {"error": "ValueError: no"}
    sides = [refused if raises else told for raises in (ours, theirs)]
    assert compare.compared(call, *sides).kind == getattr(compare, kind)


def test_layers_get_the_same_parameters_every_time():
    layer = {"args": [3, 2], "kwargs": {}}
    first, second = (outcome("paddle.nn.Linear", np.ones((1, 3), "float32"), layer=layer)[1] for _ in range(2))
    assert first == second
    assert len(first["grads"]) == 3  # input, weight, bias


def test_a_call_that_ends_or_stops_the_process_is_an_outcome_and_the_others_are_made(tmp_path, monkeypatch):
    script = tmp_path / "side.py"
    script.write_text(
        "import json, os, sys, time\n"
        "framework, calls, results, first, end = sys.argv[1:]\n"
        "with open(calls) as given, open(results, 'a') as out:\n"
        "    for n, line in enumerate(given):\n"
        "        if int(first) <= n < int(end):\n"
        "            if 'crash' in line:\n"
        "                os.abort()\n"
        "            if 'hang' in line:\n"
        "                time.sleep(60)\n"
        "            out.write(json.dumps({'outs': []}) + chr(10))\n"
        "            out.flush()\n"
    )
    monkeypatch.setattr(run, "SIDE", script)
    monkeypatch.setattr(run, "PATIENCE", 1.5)
    monkeypatch.setattr(run, "AT_ONCE", 2)
    calls = [Call("paddle.abs", "", (n,)) for n in ("a", "crash", "b", "hang", "c")]
    fine = {"outs": []}
    assert run.outcomes(sys.executable, "any", calls, tmp_path) == [fine, run.CRASHED, fine, run.HUNG, fine]
