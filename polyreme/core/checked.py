"""The checked mode, FLAGS_check_nan_inf: what ops give is looked at, and what is wrong is said with op, layer and step.

Off, it costs one attribute lookup where a backward pass visits a node, and nothing in captured code. On,
eager code looks at every value as it is made; captured code gets a host call for every op, which looks when the program
runs. docs/numerics.md says what is found where.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme import flags
from polyreme.call_site import layers_here, name_within
from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.state import TensorState, Tracer
from polyreme.errors import NumericsError

_log = logging.getLogger("polyreme.numerics")
_FLAG, _LEVEL = flags.FLAGS["FLAGS_check_nan_inf"], flags.FLAGS["FLAGS_check_nan_inf_level"]


class _Checked:
    """is_on: whether the mode is on. at_run_time: puts a host call into the program that is being captured; late: what
    programs found that nobody was told of yet; stepped: optimizers that stepped in them. layer_of: node of the tape ->
    the layer it was made in. updates: optimizer -> its steps since the mode was switched on.
    """

    __slots__ = ("at_run_time", "is_on", "late", "layer_of", "number", "stepped", "updates")
    at_run_time: Callable[..., None]

    def __init__(self) -> None:
        self.number = itertools.count()
        self.follow()

    def follow(self) -> None:
        """Take the flag's value, and count from zero."""
        self.is_on = bool(_FLAG.value)
        self.late: list[BaseException] = []
        self.stepped: list[Any] = []
        self.layer_of: Any = weakref.WeakKeyDictionary()
        self.updates: Any = weakref.WeakKeyDictionary()


checked: _Checked = _Checked()
_FLAG.changed.append(checked.follow)


# where


def layer_here() -> str:
    """The path of the layer whose call this is inside, Model/blocks.0/attention; empty outside of layers."""
    layers = layers_here()
    names = [name_within(layer, parent) for parent, layer in itertools.pairwise(layers)]
    return "/".join([*(type(layer).__name__ for layer in layers[:1]), *names])


def step_done(optimizer: Any) -> None:
    """An optimizer steps: the values that come next are of the step after."""
    if not checked.is_on:
        return
    if state.capturing():
        # the program's other host calls, which come in any order, are of the same step
        checked.at_run_time(lambda: checked.stepped.append(optimizer))
    else:
        _count([optimizer])


def _count(optimizers: Iterable[Any]) -> None:
    for optimizer in optimizers:
        checked.updates[optimizer] = checked.updates.get(optimizer, 0) + 1


def _place(layer: str, step: int) -> str:
    inside = f"in layer {layer}" if layer else "outside of any layer"
    return f"{inside}, training step {step}"


def step_now() -> int:
    """The number of the training step, from 1: what the optimizer that stepped most often does next."""
    return max(checked.updates.values(), default=0) + 1


# what is found


def report(error: BaseException | None, number: int = 0, waiting: list[BaseException] | None = None) -> None:
    """Raise an error, if it is one, now, or keep it in waiting; or log it, as FLAGS_check_nan_inf_level says."""
    if error is None:
        return
    if _LEVEL.value:
        _log.error("%s", error)
    elif waiting is None:
        try:
            raise error
        finally:
            del error  # this frame is in its traceback: a cycle that keeps what its callers have
    else:
        error.number = number  # type: ignore[attr-defined]
        waiting.append(error)


def raise_late(others: list[BaseException] | None = None) -> None:
    """Programs have ended: raise what they found wrong, the first in the order of the code. others: of these too, which
    are taken out of the list."""
    failures = [*(others or ()), *checked.late]
    _count(checked.stepped)
    for reported in (others, checked.late):
        if reported:
            reported.clear()
    checked.stepped.clear()
    if failures:
        try:
            raise min(failures, key=lambda e: getattr(e, "number", -1))
        finally:
            del failures  # as in report


def wait_for_programs() -> None:
    """Wait for the programs that were started, and raise what they found wrong; nothing, when the mode is off."""
    if checked.is_on:
        jax.effects_barrier()
        raise_late()


def verify(facts: Any, describe: Callable[[np.ndarray, str], BaseException | None], layer: str) -> None:
    """Report describe(facts, place), if it is an error: now, or, of captured code, when the program runs.

    facts: an array, or a tracer of one.
    """
    number = next(checked.number)

    def look(facts: Any) -> None:
        report(describe(np.asarray(facts), _place(layer, step_now())), number, checked.late)

    if isinstance(facts, Tracer):
        checked.at_run_time(look, facts)
        return
    report(describe(np.asarray(facts), _place(layer, step_now())))


# NaN and infinity


def floats_in(value: Any) -> list[Any]:
    """Every inexact array, of a Tensor or alone, and every Python number in arguments or results."""
    if isinstance(value, TensorState):
        value = value._array
    if isinstance(value, (list, tuple)):
        return [a for v in value for a in floats_in(v)]
    if isinstance(value, (float, complex)) and not isinstance(value, bool):
        return [value]
    return [value] if isinstance(value, (jax.Array, np.ndarray)) and dtypes.is_inexact(value.dtype) else []


def check_values(what: str, results: Iterable[tuple[str, Any]], inputs: Sequence[Any], layer: str) -> None:
    """Report NaN among results, and infinity that was not among given already.

    what: "log", or "the backward of log". results: (what each is, array).
    """
    named = [(name, a) for name, a in results if a.size]
    if not named:
        return
    every = [a for _, a in named]
    if any(isinstance(a, Tracer) for a in (*every, *inputs)):
        facts = jnp.stack([_counts(a) for a in every] + [_counts(a) for a in inputs])
    else:
        facts = np.stack([_host_counts(a) for a in every])
        if not facts.any():
            return
        facts = np.concatenate([facts, *(_host_counts(a)[None] for a in inputs)])
    count, outlines = len(every), [(n, a.dtype.name, list(a.shape), a.size) for n, a in named]
    asked = any(isinstance(g, (float, complex)) and g != g for g in inputs)  # full([2], nan)

    def describe(facts: np.ndarray, place: str) -> BaseException | None:
        had = facts[count:].sum(0) > 0 if len(facts) > count else np.zeros(2, bool)
        for (name, dtype, shape, size), (nans, infinities) in zip(outlines, facts[:count], strict=True):
            if (nans and not asked) or (infinities and not had[1]):
                origin = "was given some" if had[0 if nans else 1] else "was given none"
                return NumericsError(
                    f"{what}: {name}, {dtype}{shape}, has {nans} NaN and {infinities} infinite values of {size}, and "
                    f"it {origin}; {place} (FLAGS_check_nan_inf)"
                )
        return None

    verify(facts, describe, layer)


def _counts(value: Any) -> Any:
    """[number of NaN, number of infinities]."""
    array = jnp.asarray(value)
    array = array.astype(jnp.float32) if array.dtype.itemsize == 1 else array
    return jnp.stack([jnp.isnan(array).sum(), jnp.isinf(array).sum()])


_device_counts = jax.jit(_counts)


def _host_counts(value: Any) -> np.ndarray:
    """_counts where it is cheapest: on the host if the value is there, else on its devices."""
    if isinstance(value, jax.Array):
        devices = value.devices()
        if len(devices) > 1 or next(iter(devices)).platform != "cpu":
            return np.asarray(_device_counts(value))
    array = np.asarray(value)
    array = array.astype(np.float32) if array.dtype.itemsize == 1 else array
    return np.array([np.isnan(array).sum(), np.isinf(array).sum()])


def check_gradients(node: Any, cotangents: Sequence[Any], gradients: Sequence[Any]) -> None:
    """Look at what a node of the tape made of cotangents."""
    if not state.capturing():
        raise_late()
    named = [
        (f"the gradient of input {i}", g._array)
        for i, g in enumerate(gradients)
        if g is not None and dtypes.is_inexact(g._array.dtype)
    ]
    if named and not isinstance(named[0][1], Tracer):
        jax.block_until_ready([a for _, a in named])
        wait_for_programs()  # the backward of a captured function looks for itself, and says more
    given = floats_in([c for c in cotangents if c is not None])
    if getattr(node, "pullback", None) is None:  # else the inputs are not part of what the node keeps
        given += floats_in(getattr(node, "primals", None))
    check_values(f"the backward of {node.name}", named, given, checked.layer_of.get(node, ""))
