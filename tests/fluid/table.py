"""Layers without parameters in a table: every case of it goes into one Program, which runs once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import polyreme as paddle
from polyreme import fluid, static
from polyreme.core import unique_name


@dataclass
class Case:
    """build(*variables) is what expected is: an array, or a list of arrays for as many results.

    arrays: ndarrays, or LoDTensors. terms: how many roundings may add up in a value.
    """

    name: str
    build: Callable[..., Any]
    arrays: tuple
    expected: Any
    terms: int = 32


def run_cases(cases: Sequence[Case], seed: int = 0) -> dict[str, list[tuple[list[int], np.ndarray, list]]]:
    """Name -> (shape while recording, value, lod) of each result."""
    main, feed, outs = static.Program(), {}, {}
    main.random_seed = seed
    with unique_name.guard(), static.program_guard(main, static.Program()), static.scope_guard(static.Scope()):
        for at, case in enumerate(cases):
            variables = []
            for i, array in enumerate(case.arrays):
                name, divided = f"x{at}_{i}", isinstance(array, fluid.LoDTensor)
                feed[name] = array
                shape = [None, *array.shape()[1:]] if divided else array.shape
                levels = len(array.lod()) if divided else 0
                variables.append(fluid.data(name, shape, np.dtype(array.dtype).name, lod_level=levels))
            made = case.build(*variables)
            outs[case.name] = list(made) if isinstance(made, (list, tuple)) else [made]
        fetched = [v for several in outs.values() for v in several]
        exe = fluid.Executor(fluid.CPUPlace())
        values = iter(exe.run(main, feed=feed, fetch_list=fetched, return_numpy=False))
        paddle.disable_static()
    results = {}
    for name, several in outs.items():
        own = [next(values) for _ in several]
        results[name] = [(v.shape, np.asarray(t), t.lod()) for v, t in zip(several, own, strict=True)]
    return results


def check(case: Case, results: dict[str, list[tuple[list[int], np.ndarray, list]]]) -> None:
    """The results of a case are those expected, in the shape that was promised."""
    expected = case.expected if isinstance(case.expected, tuple) else (case.expected,)
    assert len(expected) == len(results[case.name])
    for want, (shape, value, _) in zip(expected, results[case.name], strict=True):
        want = np.asarray(want)
        assert value.shape == want.shape
        assert all(s in (-1, n) for s, n in zip(shape, value.shape, strict=True))
        assert value.dtype.kind == want.dtype.kind
        if want.dtype.kind != "f":
            np.testing.assert_array_equal(value, want)
            continue
        # each of a few terms of size up to 4 rounds once in float32
        tolerance = case.terms * np.finfo("float32").eps
        np.testing.assert_allclose(value, want, rtol=tolerance, atol=4 * tolerance)
