"""The compiled update of an optimizer: clip, regularize, apply the rule to every parameter, leave out a skipped step.

Pure functions of arrays; what else they depend on is in the frozen values here.
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.nn.clip import squared_norm

Slots = dict[str, jax.Array]
Rule = Callable[..., tuple[jax.Array, Slots, Slots]]
Numbers = Callable[..., Slots]
NumbersBySettings = Mapping[tuple, Slots]
"""By the settings of a parameter: arrays of a number for each parameter, by name."""
Update = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class RuleOfClass:
    """The rule of an optimizer's class that reads nothing of an optimizer: equal for all of the class."""

    optimizer: type

    def __call__(self, *arguments: Any) -> tuple[jax.Array, Slots, Slots]:
        # an optimizer without attributes: a rule that read one would say so
        return self.optimizer.rule(object.__new__(self.optimizer), *arguments)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ParameterOptions:
    """Static settings of the update of one parameter; part of the compiled update's identity.

    settings: the optimizer's own, such as beta1; options["beta1"] reads one.
    """

    lr_factor: float = 1.0
    weight_decay: float = 0.0
    regularizer: Any = None
    need_clip: bool = True
    decoupled: bool = False
    settings: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, name: str) -> Any:
        for key, value in self.settings:
            if key == name:
                return value
        raise KeyError(name)


@dataclass(frozen=True)
class Leaf:
    """One parameter of an update: its options, its place among all parameters, its clip and its layouts over devices.

    home: where its state is kept between updates if that is host memory, else None.

    low: dtype of the parameter itself when the update is of its float32 master weight, else None. wide: dtype of the
    arithmetic. has_entries: whether each entry of its first dim is updated and clipped as a parameter of its own.
    """

    options: ParameterOptions
    position: int
    clip: Any
    param_layout: Any
    state_layout: Any
    low: np.dtype | None
    wide: np.dtype
    home: Any
    has_entries: bool = False


def called_weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that does not keep its object alive, for what the object itself keeps: with it, an optimizer that nobody
    has any more would keep the parameters of a model until Python's collector comes by. Functions are given back."""
    if not isinstance(method, types.MethodType):
        return method
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        live: Any = reference()
        return live(*args)

    return call


def compile_update(
    rule: Rule,
    numbers: Numbers,
    prepare: Callable[..., jax.Array],
    leaves: Sequence[Leaf],
    name: str,
    together: Mapping[int, Sequence[int]],
) -> Update:
    """inputs (lr, params, low, grads, slots, scalars, skip, squares) -> new params, low, slots, scalars; one jitted
    call.

    numbers: Optimizer.numbers. prepare(g, options): the gradient as the rule's optimizer takes it, applied after
    clipping and before penalties.
    squares: empty if the leaves are all that is clipped; else what compile_squares gives for each part of the
    parameters, and together says which of those numbers count for a clip: its id -> places.
    """
    positions = np.asarray([leaf.position for leaf in leaves])

    def update(inputs: dict[str, Any]) -> dict[str, Any]:
        norms = clip_norms(inputs["squares"], together)
        return updated(rule, prepare, leaves, positions, norms, inputs, numbers_of(numbers, leaves, inputs["scalars"]))

    update.__name__ = name
    return jax.jit(update)


def numbers_of(numbers: Numbers, leaves: Sequence[Leaf], scalars: Slots) -> NumbersBySettings:
    """What numbers gives for the settings of each leaf, of all parameters at once: a program for each of a parameter's
    numbers would take longer to compile than its update."""
    options = {leaf.options.settings: leaf.options for leaf in leaves}
    return {settings: numbers(scalars, of) for settings, of in options.items()}


def updated(
    rule: Rule,
    prepare: Callable[..., jax.Array],
    leaves: Sequence[Leaf],
    positions: Any,
    norms: Mapping[int, jax.Array],
    inputs: dict[str, Any],
    numbers: NumbersBySettings,
) -> dict[str, Any]:
    """The function that compile_update compiles. positions: of the leaves among the scalars. norms, numbers: of
    clip_norms and numbers_of."""
    inputs = _fetch(inputs, leaves)
    params = [_constrain(wide(p), leaf.state_layout) for p, leaf in zip(inputs["params"], leaves, strict=True)]
    grads = _gradients(inputs["grads"], params, leaves, prepare, norms)
    scalars = [
        {n: s[at] for n, s in (inputs["scalars"] | numbers[leaf.options.settings]).items()}
        for leaf, at in zip(leaves, positions, strict=True)
    ]
    # traced once for each kind and shape of parameter: jax takes 0.3 ms for each of some twenty operations
    kinds = [replace(kind_of(leaf), clip=None) for leaf in leaves]
    updates = {kind: _leaf_update(rule, kind) for kind in set(kinds)}
    done = [
        updates[kind](*arrays, inputs["lr"], inputs["skip"])
        for kind, *arrays in zip(
            kinds, params, grads, inputs["params"], inputs["low"], inputs["slots"], scalars, strict=True
        )
    ]
    return {
        "params": [d["param"] for d in done],
        "low": [d["low"] for d in done],
        "slots": [d["slots"] for d in done],
        "scalars": {
            n: s.at[positions].set(jnp.stack([d["scalars"][n] for d in done])) for n, s in inputs["scalars"].items()
        },
    }


def _fetch(inputs: dict[str, Any], leaves: Sequence[Leaf]) -> dict[str, Any]:
    """The inputs with the state that lives in host memory brought to the devices."""

    def near(x: jax.Array, leaf: Leaf) -> jax.Array:
        return x if leaf.home is None else jax.device_put(x, leaf.state_layout)

    params = [p if leaf.low is None else near(p, leaf) for p, leaf in zip(inputs["params"], leaves, strict=True)]
    slots = [{n: near(s, leaf) for n, s in held.items()} for held, leaf in zip(inputs["slots"], leaves, strict=True)]
    return inputs | {"params": params, "slots": slots}


def _send_home(x: jax.Array, leaf: Leaf) -> jax.Array:
    """State as it is kept until the next update."""
    x = _constrain(x, leaf.state_layout)
    return x if leaf.home is None else jax.device_put(x, leaf.home)


def compile_gradient(leaves: Sequence[Leaf], prepare: Callable[..., jax.Array]) -> Callable[..., Any]:
    """(params, grads) -> the gradients as a rule takes them, clipped and with penalties, in a row."""

    def gradient(params: Sequence[jax.Array], grads: Sequence[jax.Array]) -> jax.Array:
        done = _gradients(grads, [wide(p) for p in params], leaves, prepare, {})
        return jnp.concatenate([g.reshape(-1) for g in done])

    return jax.jit(gradient)


def compile_squares(leaves: Sequence[Leaf], count: int, dtype: np.dtype) -> Callable[..., Any]:
    """gradients -> the sum of squares of each at its place among `count` zeros; one jitted call."""
    positions = np.asarray([leaf.position for leaf in leaves])

    def squares(grads: list[jax.Array]) -> jax.Array:
        each = [square_of(g, leaf) for g, leaf in zip(grads, leaves, strict=True)]
        return jnp.zeros((count,), dtype).at[positions].set(jnp.stack([e.astype(dtype) for e in each]))

    return jax.jit(squares)


def clip_norms(squares: Sequence[jax.Array], together: Mapping[int, Sequence[int]]) -> dict[int, jax.Array]:
    """id of a clip -> norm of all gradients it looks at, added up in the order that one update over all would."""
    if not squares:
        return {}
    # where one part has a number the others have 0, so that no rounding depends on the parts
    every = functools.reduce(operator.add, squares)
    zero = jnp.zeros((), every.dtype)
    return {
        clip: jnp.sqrt(functools.reduce(operator.add, [every[at] for at in places], zero))
        for clip, places in together.items()
    }


def square_of(g: jax.Array, leaf: Leaf) -> jax.Array:
    """The sum of squares of one gradient."""
    return squared_norm([_as_state(g, leaf)])


def _as_state(g: jax.Array, leaf: Leaf) -> jax.Array:
    return _constrain(g.astype(leaf.wide), leaf.state_layout)


def kind_of(leaf: Leaf) -> Leaf:
    """The key shared by parameters that are updated alike."""
    return replace(leaf, position=0)


def _leaf_update(rule: Rule, leaf: Leaf) -> Callable[..., dict[str, Any]]:
    """_update_leaf of a kind, whose traces optimizers share if their rule is equal."""
    if not isinstance(rule, RuleOfClass) or leaf.options.regularizer is not None:
        return jax.jit(functools.partial(_update_leaf, rule, leaf), inline=True)
    return _shared_leaf_update(rule, leaf)


@functools.lru_cache(maxsize=512)
def _shared_leaf_update(rule: RuleOfClass, leaf: Leaf) -> Callable[..., dict[str, Any]]:
    return jax.jit(functools.partial(_update_leaf, rule, leaf), inline=True)


def _update_leaf(
    rule: Rule,
    leaf: Leaf,
    p: jax.Array,
    g: jax.Array,
    old_p: jax.Array,
    old_low: jax.Array | None,
    old_slots: Slots,
    mine: Slots,
    lr: jax.Array,
    skip: jax.Array | None,
) -> dict[str, Any]:
    """The update of one leaf. p, g: in the arithmetic's dtype, as the rule takes them. mine: its numbers."""
    rate = (lr * leaf.options.lr_factor).astype(jnp.finfo(p.dtype).dtype)
    if leaf.has_entries:
        rule = _by_entry(rule)
    new_p, new_slots, new_mine = rule(p, g, rate, {n: wide(s) for n, s in old_slots.items()}, mine, leaf.options)
    new_p = new_p.astype(old_p.dtype)
    low = None if leaf.low is None else new_p.astype(leaf.low)
    new_slots = {n: s.astype(old_slots[n].dtype) for n, s in new_slots.items()}
    if skip is not None:
        new_p = jnp.where(skip, old_p, new_p)
        # from the parameter itself: rounding the master again would undo what else was written into it
        low = None if low is None or old_low is None else jnp.where(skip, old_low, low)
        new_slots = {n: jnp.where(skip, old_slots[n], s) for n, s in new_slots.items()}
        new_mine = {n: jnp.where(skip, mine[n], s) for n, s in new_mine.items()}
    return {
        "param": _constrain(new_p, leaf.param_layout) if low is None else _send_home(new_p, leaf),
        "low": None if low is None else _constrain(low, leaf.param_layout),
        "slots": {n: _send_home(s, leaf) for n, s in new_slots.items()},
        "scalars": new_mine,
    }


def _by_entry(rule: Rule) -> Rule:
    """The rule on each entry of the first dim, which may take a norm of it."""

    def update(p: Any, g: Any, rate: Any, slots: Slots, mine: Slots, options: ParameterOptions) -> Any:
        def one(p: Any, g: Any, slots: Slots) -> Any:
            return rule(p, g, rate, slots, mine, options)

        return jax.vmap(one, out_axes=(0, 0, None))(p, g, slots)

    return update


def _gradients(
    grads: Sequence[jax.Array],
    params: Sequence[jax.Array],
    leaves: Sequence[Leaf],
    prepare: Callable[..., jax.Array],
    norms: Mapping[int, jax.Array],
) -> list[jax.Array]:
    """The gradients as the rule takes them: in its dtype, laid out as the state, clipped, with penalties."""
    done = _clip([_as_state(g, leaf) for g, leaf in zip(grads, leaves, strict=True)], leaves, norms)
    done = [prepare(g, leaf.options) for g, leaf in zip(done, leaves, strict=True)]
    return [_regularize(g, p, leaf.options) for g, p, leaf in zip(done, params, leaves, strict=True)]


def _clip(grads: list[jax.Array], leaves: Sequence[Leaf], norms: Mapping[int, jax.Array]) -> list[jax.Array]:
    """Each gradient clipped by its clip, together with all others of that clip; need_clip=False leaves one alone.

    norms: of all gradients of a clip, for clips some of whose gradients are not here.
    """
    done = list(grads)
    for clip in {id(leaf.clip): leaf.clip for leaf in leaves if leaf.clip is not None}.values():
        chosen = [i for i, leaf in enumerate(leaves) if leaf.clip is clip and leaf.options.need_clip]
        if chosen:
            mine = [grads[i] for i in chosen]
            norm = norms.get(id(clip))
            clipped = clip.arrays(mine) if norm is None else clip.scaled(mine, norm)
            for i, g in zip(chosen, clipped, strict=True):
                if clip.one_by_one and leaves[i].has_entries:
                    g = jax.vmap(lambda entry, clip=clip: clip.arrays([entry])[0])(grads[i])
                done[i] = g.astype(grads[i].dtype)
    return done


def _regularize(g: jax.Array, p: jax.Array, options: ParameterOptions) -> jax.Array:
    """The gradient with the penalty's gradient added: a regularizer's own, or L2 of a plain coefficient."""
    if options.regularizer is not None:
        return g + options.regularizer.gradient(p).astype(g.dtype)
    if options.decoupled or not options.weight_decay:
        return g
    return g + jnp.asarray(options.weight_decay, g.dtype) * p


def wide(x: jax.Array) -> jax.Array:
    """x in the dtype of the arithmetic, at least float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _constrain(x: jax.Array, sharding: Any) -> jax.Array:
    return x if sharding is None or x.ndim == 0 else jax.lax.with_sharding_constraint(x, sharding)
