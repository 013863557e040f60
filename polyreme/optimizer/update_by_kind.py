"""An optimizer's first updates, by programs that compile soon: one for each kind of parameter.

One program over all parameters takes as long to compile as there are parameters: 2.8 s of processor time for the 161 of
a ResNet-50, which are of 28 kinds. But calling one for each takes 30 us a parameter and step; so after a number of
steps the whole program is compiled beside them, and takes over, unless there are too many for that. On CPU both give
the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Thread
from typing import Any, NamedTuple

import jax
import numpy as np

from polyreme.core.devices.transfer import from_host
from polyreme.core.meshes import devices_of, on_one_device
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.optimizer.update import (
    Leaf,
    Numbers,
    NumbersBySettings,
    Rule,
    clip_norms,
    kind_of,
    numbers_of,
    square_of,
    updated,
)

# parameters of a kind that there is already; each takes 17 ms or more to compile
_FEWEST_ALIKE = 8
STEPS_BY_KIND = 64
"""Updates before the whole program is compiled: until then the calls have cost a few hundredths of what that takes."""
MOST_IN_WHOLE = 1024
"""Parameters above which it never is: compiling it took 150 s for 558 on a busy machine, to spare less than half of
each one's call (benchmarks/results/fused_update_busy_2026-11-27.md), and a list of small blocks has thousands. Layers
in nn.Stacked have few parameters, whatever their number."""


def is_worthwhile(leaves: Sequence[Leaf], params: Sequence[jax.Array]) -> bool:
    """Whether updates by kind compile much less than the whole one, and give the same."""
    kinds = {(kind_of(leaf), p.shape, p.dtype) for leaf, p in zip(leaves, params, strict=True)}
    # a call over several devices takes a millisecond
    if len(leaves) - len(kinds) < _FEWEST_ALIKE or any(len(devices_of(p)) > 1 for p in params):
        return False
    clips = {id(leaf.clip): leaf.clip for leaf in leaves if leaf.clip is not None}.values()
    # squares of float32 and float64 gradients are added up in float64, and by the whole only from the first of those on
    is_mixed = len({leaf.wide for leaf in leaves}) > 1
    return all(clip.one_by_one or (isinstance(clip, ClipGradByGlobalNorm) and not is_mixed) for clip in clips)


class Common(NamedTuple):
    """Common inputs of all updates of a step: numbers by settings, norms by the id of a clip."""

    lr: Any
    skip: Any
    norms: Mapping[int, jax.Array]
    numbers: NumbersBySettings

    def on_one_device(self) -> Common:
        """These inputs on one device; all devices of the parameters hold them whole."""
        return Common(
            on_one_device(self.lr),
            None if self.skip is None else on_one_device(self.skip),
            {clip: on_one_device(norm) for clip, norm in self.norms.items()},
            {settings: {n: on_one_device(v) for n, v in numbers.items()} for settings, numbers in self.numbers.items()},
        )


class KindUpdates:
    """The update of each of some parameters, by a program for each kind of them, and what those take in common.

    leaves: of those parameters. together: as for compile_update, if calls give squares; else empty, and a clip looks at
    the leaves alone.
    """

    def __init__(
        self,
        rule: Rule,
        numbers: Numbers,
        prepare: Callable[..., jax.Array],
        leaves: Sequence[Leaf],
        name: str,
        together: Mapping[int, Sequence[int]],
    ) -> None:
        self.leaves = leaves
        self._positions = [from_host(np.asarray([leaf.position])) for leaf in leaves]
        kinds = [kind_of(leaf) for leaf in leaves]
        updates = {kind: _compile_one(rule, prepare, kind, name) for kind in set(kinds)}
        squares = {kind: _compile_square(kind) for kind in updates}
        self._updates = [updates[kind] for kind in kinds]
        self._squares = [squares[kind] for kind in kinds]
        self._together = together or _clipped_together(leaves)
        self._numbers_rule = numbers
        self._numbers: Callable[..., Any] | None = None
        self._settings = list(dict.fromkeys(leaf.options.settings for leaf in leaves))
        self._norms = jax.jit(functools.partial(clip_norms, together=self._together))

    def common(self, inputs: dict[str, Any]) -> Common:
        """The common inputs of a step's updates. inputs: compile_update's; grads where squares are not given."""
        scalars = inputs["scalars"]
        if self._numbers is None:
            self._numbers = _compile_numbers(self._numbers_rule, self.leaves, scalars)
        numbers = dict(zip(self._settings, self._numbers(scalars), strict=True))
        return Common(inputs["lr"], inputs["skip"], self._clip_norms(inputs), numbers)

    def one(
        self, at: int, common: Common, param: Any, low: Any, grad: Any, slots: Any, scalars: Any
    ) -> tuple[Any, Any, Any, Any]:
        """The update of the leaf at a place -> its new parameter, low copy and slots, and the scalars of all."""
        leaf = self.leaves[at]
        norm, numbers = common.norms.get(id(leaf.clip)), common.numbers[leaf.options.settings]
        return self._updates[at](
            common.lr, param, low, grad, slots, scalars, numbers, common.skip, norm, self._positions[at]
        )

    def squares(self, gradients: Iterable[jax.Array], total: jax.Array) -> jax.Array:
        """total with the sum of squares of each leaf's gradient at its place; gradients are looked at one by one."""
        for square, gradient, position in zip(self._squares, gradients, self._positions, strict=True):
            total = square(total, gradient, position)
        return total

    def _clip_norms(self, inputs: dict[str, Any]) -> Mapping[int, jax.Array]:
        if not self._together:
            return {}
        squares = inputs["squares"]
        if not squares:
            count = 1 + max(leaf.position for leaf in self.leaves)
            squares = [self.squares(inputs["grads"], from_host(np.zeros((count,), self.leaves[0].wide)))]
        return self._norms(squares)


class UpdateByKind:
    """What compile_update makes, as `whole`, until that is compiled: the same arguments, the same results."""

    def __init__(self, updates: KindUpdates, whole: Any) -> None:
        self._by_kind = updates
        self._whole = whole
        self._steps_left = STEPS_BY_KIND
        self._takes_whole = len(updates.leaves) <= MOST_IN_WHOLE
        self._compiler: Thread | None = None

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if self._is_whole_compiled(inputs):
            return self._whole(inputs)
        common, scalars = self._by_kind.common(inputs), inputs["scalars"]
        columns = [inputs[name] for name in ("params", "low", "grads", "slots")]
        params, lows, slots = [], [], []
        for at, (param, low, grad, slot) in enumerate(zip(*columns, strict=True)):
            new_param, new_low, new_slot, scalars = self._by_kind.one(at, common, param, low, grad, slot, scalars)
            params.append(new_param)
            lows.append(new_low)
            slots.append(new_slot)
        return {"params": params, "low": lows, "slots": slots, "scalars": scalars}

    def _is_whole_compiled(self, inputs: dict[str, Any]) -> bool:
        """Whether the whole program is there; begins to compile it after so many steps."""
        if not self._takes_whole:
            return False
        if self._compiler is not None:
            return not self._compiler.is_alive()
        self._steps_left -= 1
        if self._steps_left == 0:
            described = jax.tree.map(_describe, inputs)
            self._compiler = Thread(target=lambda: self._whole.lower(described).compile(), name="whole update")
            self._compiler.start()
        return False


def _compile_one(rule: Rule, prepare: Callable[..., jax.Array], leaf: Leaf, name: str) -> Callable:
    """The update of one parameter of a kind, whose place among the scalars is an array of one integer."""

    def update(
        lr: Any,
        param: Any,
        low: Any,
        grad: Any,
        own: Any,
        scalars: Any,
        numbers: Any,
        skip: Any,
        norm: Any,
        position: Any,
    ) -> tuple[Any, Any, Any, Any]:
        inputs = {"lr": lr, "params": [param], "low": [low], "grads": [grad], "slots": [own], "scalars": scalars}
        norms = {} if norm is None else {id(leaf.clip): norm}
        numbers = {leaf.options.settings: numbers}
        new = updated(rule, prepare, [leaf], position, norms, inputs | {"skip": skip}, numbers)
        return new["params"][0], new["low"][0], new["slots"][0], new["scalars"]

    update.__name__ = name
    return jax.jit(update)


def _compile_numbers(numbers: Numbers, leaves: Sequence[Leaf], scalars: Any) -> Callable:
    """scalars -> the values of numbers_of, in the order of the leaves' settings; no program where there are none."""

    def values(scalars: Any) -> list[Any]:
        return list(numbers_of(numbers, leaves, scalars).values())

    described = jax.eval_shape(values, scalars)
    return jax.jit(values) if jax.tree.leaves(described) else lambda scalars: described


def _compile_square(leaf: Leaf) -> Callable:
    @jax.jit
    def square(total: jax.Array, grad: jax.Array, position: jax.Array) -> jax.Array:
        return total.at[position].set(square_of(grad, leaf).astype(total.dtype))

    return square


def _clipped_together(leaves: Sequence[Leaf]) -> dict[int, list[int]]:
    """id of each clip by global norm -> places of the leaves it looks at."""
    places: dict[int, list[int]] = {}
    for leaf in leaves:
        if isinstance(leaf.clip, ClipGradByGlobalNorm) and leaf.options.need_clip:
            places.setdefault(id(leaf.clip), []).append(leaf.position)
    return places


def _describe(array: jax.Array) -> jax.ShapeDtypeStruct:
    where = array.sharding if array.committed else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where, weak_type=array.weak_type)
