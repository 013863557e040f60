"""Random generators: a key held as state, split once for every random op.

Numbers depend on the seed and on the order of calls only, never on how arrays are sharded
(threefry is partitionable). The key is persistent state, so a captured step reads and advances it like a parameter.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from polyreme import host_random
from polyreme.core import layout as layouts
from polyreme.core import state
from polyreme.core.devices.abstract import Abstract
from polyreme.errors import ConfigError


class Generator:
    """A stream of random keys. drawn: how many were asked for here, those drawn from other streams included.

    >>> g = Generator().manual_seed(7)
    >>> g.initial_seed()
    7
    """

    is_bound: bool
    drawn: int

    def __init__(self, device: Any = None) -> None:
        if device is not None:
            raise ConfigError("Generator: numbers do not depend on the device here; leave device out")
        self._seed = 0
        self._state: state.TensorState | None = None
        self.is_bound = False
        self.drawn = 0

    def key_state(self) -> state.TensorState:
        """The persistent key, uint32 [2]; made on first use, so that importing starts no backend."""
        if self._state is None:
            with state.outside_capture():
                self._state = state.TensorState(jax.random.PRNGKey(self._seed))
        return self._state

    def manual_seed(self, seed: int) -> Generator:
        """Start the stream again from seed, an integer of at least 0 below 2**64. Raises ConfigError for others."""
        self._seed = _check(seed)
        if self._state is not None:
            state.touch(self._state)
            state.write(self._state, jax.random.PRNGKey(self._seed))
        return self

    def seed(self) -> int:
        """Start again from a seed taken from the operating system; returns it."""
        self.manual_seed(secrets.randbits(32))
        return self._seed

    def initial_seed(self) -> int:
        """The seed the stream started from."""
        return self._seed

    def random(self) -> int:
        """A random integer below 2**32, drawn on the host."""
        return int(np.asarray(self.next_key())[1])

    def get_state(self) -> np.ndarray:
        """The key now, uint32 [2]."""
        return np.array(state.host(self.key_state(), "Generator.get_state()"))

    def set_state(self, key: Any) -> None:
        """Continue from a key that get_state returned."""
        key = np.asarray(key, np.uint32)
        if key.shape != (2,):
            raise ConfigError(
                f"Generator.set_state needs the uint32 [2] array of get_state, got shape {list(key.shape)}"
            )
        state.write(self.key_state(), jax.numpy.asarray(key))

    @contextmanager
    def drawing_from(self, other: Generator) -> Iterator[None]:
        """Inside the block keys come from other's stream, which advances; this one's stays where it is.

        Where is_bound, other's stays and a branch of this one is drawn from.
        """
        outer = self.key_state()
        stream = state.TensorState(self.next_key()) if self.is_bound else other.key_state()
        self._state = stream
        try:
            yield
        finally:
            self._state = outer

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Inside the block all random numbers follow from this stream's key, those of other streams too: what a program
        needs that is given a key at each call, so that its numbers depend on that key alone.
        """
        outer, self.is_bound = self.is_bound, True
        try:
            yield
        finally:
            self.is_bound = outer

    @contextmanager
    def starting_at(self, key: Any) -> Iterator[None]:
        """Inside the block keys follow from this one; afterwards the stream goes on as if nothing had been drawn."""
        holder = self.key_state()
        outer = state.read(holder)
        state.write(holder, key)
        try:
            yield
        finally:
            state.write(holder, outer)

    def branches(self, count: int) -> list[Any]:
        """Keys to start `count` streams at, one for each microbatch of a step; this stream advances by one key.

        A microbatch then draws the same numbers whichever order, and wherever, the microbatches run in.
        """
        key = self.next_key()
        return [key] * count if isinstance(key, Abstract) else _branches(key, count)

    def next_key(self) -> Any:
        """One key of its own, advancing the stream."""
        self.drawn += 1
        holder = self.key_state()
        before = state.read(holder)
        if isinstance(before, Abstract):  # over devices that may not be here: nothing is drawn from it
            return before
        following, key = _split_key(_at_home(before))
        state.write(holder, following)
        return key


def _at_home(key: Any) -> Any:
    """The key itself; where a program over a mesh that is no longer in force left it there, a copy that lies nowhere in
    particular, so that what is drawn from it can go with any Tensor."""
    if layouts.active.layout is None and isinstance(key, jax.Array) and not isinstance(key, state.Tracer):
        return key if len(key.devices()) == 1 else jax.numpy.asarray(np.asarray(key))
    return key


@jax.jit
def _split_key(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    pair = jax.random.split(key)
    return pair[0], pair[1]


@functools.partial(jax.jit, static_argnums=1)
def _branches(key: jax.Array, count: int) -> list[jax.Array]:
    return [jax.random.fold_in(key, i) for i in range(count)]


def _check(seed: Any) -> int:
    is_whole = hasattr(seed, "__index__") or (isinstance(seed, float) and seed.is_integer())
    if not is_whole or not 0 <= int(seed) < 2**64:
        raise ConfigError(f"seed: {seed!r}; give an integer of at least 0 and below 2**64")
    return int(seed)


default_generator: Generator = Generator()


def fixed_key(seed: int | None) -> dict[str, np.ndarray]:
    """Arguments with which an op draws the numbers of this seed at every call; none for 0 and None."""
    return {"key": np.array([0, _check(seed) % 2**32], np.uint32)} if seed else {}


def seed(seed: int) -> Generator:
    """Seed random ops, samplers and splits; returns the default generator."""
    host_random.start(_check(seed))
    return default_generator.manual_seed(seed)


def fresh_seed() -> int:
    """Seed as seed does, with a number from the operating system; returns it."""
    return seed(secrets.randbits(63)).initial_seed()


def get_rng_state(device: Any = None) -> list[np.ndarray]:
    """State of the default generator, as a list with one array (one generator serves all devices)."""
    return [default_generator.get_state()]


def set_rng_state(state_list: list[np.ndarray], device: Any = None) -> None:
    """Continue the default generator from what get_rng_state returned."""
    default_generator.set_state(state_list[0])
