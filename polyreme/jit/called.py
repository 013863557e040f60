"""A compiled call that remembers how it was called, so that its program can be read later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from polyreme.core.devices.abstract import Abstract, described, mode
from polyreme.core.devices.device_memory import raise_explained
from polyreme.core.engine.backend import config
from polyreme.core.engine.turns import turns


class Called:
    """jax.jit of a function.

    calls: how often it was called. The arguments of the first call are remembered as shapes, dtypes and layouts, no
    arrays with them.
    """

    name: str
    calls: int

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        self._run = jax.jit(fn, **options)
        self.lower = self._run.lower
        self.name = getattr(fn, "__name__", "")
        self.calls = 0
        self._first: tuple[Any, ...] = ()
        self._program: Any = None
        # by the arguments' shapes, dtypes and layouts: what calls without memory give
        self._results: dict[Any, tuple[Any, list[tuple]]] = {}

    def __call__(self, *args: Any) -> Any:
        if not self.calls:
            self._first = jax.tree.map(_describe, args)  # now: the call may donate them
        self.calls += 1
        if mode.is_on:
            return self._abstractly(args)
        try:
            return turns.end(self._run(*args))
        except jax.errors.JaxRuntimeError as error:
            raise_explained(error, f"program {self.name}")

    def compiled(self) -> Any:
        """The program of the first call, compiled again with its own names: a jax.stages.Compiled.

        Only after a call.
        """
        if self._program is None:
            with names_in_cache_key():
                self._program = self.lower(*self._first).compile()
        return self._program

    def _abstractly(self, args: tuple[Any, ...]) -> Any:
        """The results of the call as abstract arrays: the program is compiled for where its results lie."""
        leaves, structure = jax.tree.flatten(args)
        key = (structure, tuple((a.shape, a.dtype, a.sharding) for a in leaves))
        if key not in self._results:
            with names_in_cache_key():
                lowered = self.lower(*jax.tree.map(described, args))
                self._program = lowered.compile()
            places = jax.tree.leaves(self._program.output_shardings)
            shapes, form = jax.tree.flatten(lowered.out_info)
            self._results[key] = form, [(s.shape, s.dtype, at) for s, at in zip(shapes, places, strict=True)]
        form, results = self._results[key]
        return jax.tree.unflatten(form, [Abstract.of(*each) for each in results])


@contextmanager
def names_in_cache_key() -> Iterator[None]:
    """Inside the block the compile cache tells programs apart by the names in them too, not by what they compute only:
    it would hand out an equal program with the names of another function's layers.
    """
    key = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(config, key)
    config.update(key, True)
    try:
        yield
    finally:
        config.update(key, before)


def _describe(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return described(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type)
