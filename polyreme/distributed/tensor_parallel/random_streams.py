"""Named streams of random numbers, and dropout that draws from one.

A random number belongs to an element of a global Tensor, not to a device, so every stream gives the same
numbers on every mesh; there is no stream of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from polyreme.core import layout as layouts
from polyreme.core import rng, state
from polyreme.core.rng import Generator
from polyreme.eager.host import put
from polyreme.errors import ConfigError, did_you_mean
from polyreme.nn import functional as F

MODEL_PARALLEL_RNG = "model_parallel_rng"


class RNGStatesTracker:
    """Streams by name. Inside `rng_state(name)` every random op draws from that stream, eager or captured.

    Under train_batch the numbers of a microbatch follow from a key of its own, whatever stage and schedule runs it: a
    stream is then a branch of that key, another one each time, and its own state stays where it is.

    >>> tracker = RNGStatesTracker()
    >>> tracker.add("dropout", 7)
    >>> with tracker.rng_state("dropout"):
    ...     same = rng.default_generator.random()
    >>> same == Generator().manual_seed(7).random()
    True
    """

    def __init__(self) -> None:
        self._streams: dict[str, Generator] = {}
        self._seeds: dict[str, int] = {}

    @property
    def states_(self) -> Mapping[str, Generator]:
        """The streams by name, as code for PaddlePaddle looks into them; read only."""
        return MappingProxyType(self._streams)

    @property
    def seeds_(self) -> frozenset[int]:
        """The seeds that streams started from."""
        return frozenset(self._seeds.values())

    def reset(self) -> None:
        """Forget every stream."""
        self._streams, self._seeds = {}, {}

    def add(self, name: str, seed: int) -> None:
        """A new stream that starts from seed; ConfigError if the name or the seed is in use here."""
        if name in self._streams:
            raise ConfigError(f"add({name!r}, {seed}): there is a stream of that name already; choose another name")
        for other, taken in self._seeds.items():
            if taken == seed:
                raise ConfigError(
                    f"add({name!r}, {seed}): stream {other!r} started from that seed, so both would give the same "
                    "numbers; choose another seed"
                )
        self._streams[name], self._seeds[name] = Generator().manual_seed(seed), seed

    def get_states_tracker(self) -> dict[str, np.ndarray]:
        """The state of every stream: name -> uint32 [2]."""
        return {name: stream.get_state() for name, stream in self._streams.items()}

    def set_states_tracker(self, states: Mapping[str, Any]) -> None:
        """Continue from what get_states_tracker returned: those streams and no others."""
        if not isinstance(states, Mapping):
            raise ConfigError(f"set_states_tracker takes a dict of name -> state, got {type(states).__name__}")
        streams = {name: self._streams.get(name) or Generator() for name in states}
        for name, stream in streams.items():
            stream.set_state(states[name])
        self._streams = streams

    @contextmanager
    def rng_state(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Random ops inside the block draw from this stream, which advances; ConfigError for a name not added."""
        if name not in self._streams:
            raise ConfigError(f"rng_state({name!r}): no such stream{did_you_mean(name, self._streams)}; add() it first")
        stream = self._streams[name]
        if not rng.default_generator.is_bound:
            _settle(stream.key_state())
        with rng.default_generator.drawing_from(stream):
            yield


def _settle(key: state.TensorState) -> None:
    """Move a stream's key to the devices of the layout in force, as a plan moves the default generator's."""
    array, layout = key._array, layouts.active.layout
    if isinstance(array, state.Tracer):
        return
    devices = None if layout is None else set(layout.mesh.devices.flat)
    with state.outside_capture():
        if layout is not None and array.sharding.device_set != devices:
            state.write(key, put(array, layout.replicated()))
        elif layout is None and len(array.sharding.device_set) > 1:
            state.write(key, jnp.asarray(np.asarray(array)))


_tracker = RNGStatesTracker()


def get_rng_state_tracker() -> RNGStatesTracker:
    """The tracker that model_parallel_random_seed sets up and mpu.dropout draws from."""
    return _tracker


def model_parallel_random_seed(seed: int | None = None) -> None:
    """Seed the default generator with seed, and start one stream, "model_parallel_rng", from seed + 1; others go.

    None takes a seed from the default generator, so that processes which were seeded alike stay alike.
    """
    chosen = rng.default_generator.random() if seed is None else seed
    rng.seed(chosen)
    _tracker.reset()
    _tracker.add(MODEL_PARALLEL_RNG, chosen + 1)


def start_stream(seed: int | None) -> bool:
    """Start the stream of model-parallel dropout, which scripts expect after fleet.init; True if one was started.

    seed: as model_parallel_random_seed takes it. None starts it from what follows the default generator's seed, whose
    numbers stay as they are, unless there are streams already.
    """
    if seed is not None:
        model_parallel_random_seed(seed)
        return True
    if _tracker.get_states_tracker():
        return False
    _tracker.add(MODEL_PARALLEL_RNG, rng.default_generator.initial_seed() + 1)
    return True


def dropout(
    x: Any,
    p: float = 0.5,
    axis: Any = None,
    rng_name: str | None = None,
    training: bool = True,
    mode: str = "upscale_in_train",
    name: str | None = None,
) -> Any:
    """nn.functional.dropout, drawing from the stream rng_name of get_rng_state_tracker() (None: the default one)."""
    if rng_name is None:
        return F.dropout(x, p, axis, training, mode=mode)
    with _tracker.rng_state(rng_name):
        return F.dropout(x, p, axis, training, mode=mode)
