"""What predictors of one model share: weights on a device, and programs compiled for the shapes they meet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from polyreme.core.engine import backend, forks
from polyreme.errors import ConfigError, DeviceError, ShapeError
from polyreme.export import Artifact, read
from polyreme.export.manifest import MAIN
from polyreme.export.spec import BATCH, ArraySpec
from polyreme.inference.config import Config

Run = Callable[[list[Any]], list[jax.Array]]


class ArtifactEngine:
    """An artefact on a device. run(arrays) -> arrays; thread-safe, compiling each set of shapes once."""

    buckets: tuple[int, ...]
    state: Any

    def __init__(self, config: Config) -> None:
        if config.optim_cache_dir is not None:
            backend.config.update("jax_compilation_cache_dir", config.optim_cache_dir)
            backend.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        self.artifact: Artifact = read(*config.files)
        if config.place.is_cpu_place():
            backend.run_in_calling_thread()
        self.device = config.place.device()
        self.buckets = config.batch_buckets
        self.function = self.artifact.function(MAIN)
        self._check_platform()
        if self.buckets:
            self._check_buckets()
        self._where = SingleDeviceSharding(self.device)
        self.state = jax.device_put(self.artifact.stored, self._where)
        self._runs: dict[Any, Run] = {}
        self._compiling = threading.Lock()

    @property
    def num_compiled(self) -> int:
        """Sets of shapes that are compiled."""
        return len(self._runs)

    def run(self, arrays: list[Any]) -> list[jax.Array]:
        """The outputs, in order, for the inputs in order. Raises ShapeError or DTypeError, naming the input."""
        forks.check("a Predictor's run")
        key = tuple([(a.shape, a.dtype) for a in arrays])
        run = self._runs.get(key)
        if run is None:
            self.function.check(arrays)
            run = self._prepared(key, [tuple(a.shape) for a in arrays])
        return run(arrays)

    def place(self, array: jax.Array) -> jax.Array:
        """A jax array on this engine's device."""
        return array if array.sharding.device_set == {self.device} else jax.device_put(array, self._where)

    def warm_up(self, shapes: Sequence[Mapping[str, Sequence[int]]] | None) -> int:
        """Compiles for these shapes, each {input: shape}; for every bucket if None. Returns how many are compiled."""
        for sizes in self._usual_shapes() if shapes is None else [self._in_order(s) for s in shapes]:
            arrays = [np.zeros(s, spec.dtype) for s, spec in zip(sizes, self.function.inputs, strict=True)]
            jax.block_until_ready(self.run(arrays))
        return self.num_compiled

    def _prepared(self, key: Any, shapes: list[tuple[int, ...]]) -> Run:
        with self._compiling:
            run = self._runs.get(key)
            if run is None:
                program = self.function.program_for(shapes)
                batch = self._batch_of(program.inputs, shapes) if self.buckets else None
                run = self._compiled(shapes) if batch is None else self._padding(program, shapes, batch)
                self._runs[key] = run
            return run

    def _compiled(self, shapes: Sequence[tuple[int, ...]]) -> Run:
        """The program compiled ahead for exactly these shapes."""
        program = self.function.program_for(shapes)
        inputs = [
            jax.ShapeDtypeStruct(shape, spec.dtype, sharding=self._where)
            for shape, spec in zip(shapes, program.inputs, strict=True)
        ]
        state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._where), self.state)
        call = jax.jit(program.call).lower(state, inputs).compile()
        weights = self.state
        return lambda arrays: call(weights, arrays)

    def _padding(self, program: Any, shapes: Sequence[tuple[int, ...]], batch: int) -> Run:
        """The program of the bucket that holds the batch, with padding before and cutting after."""
        size = next((n for n in self.buckets if n >= batch), None)
        if size is None:
            raise ShapeError(
                f"a batch of {batch}, but the largest bucket is {self.buckets[-1]}; split it, or add a bucket with "
                "Config.enable_batch_buckets"
            )
        is_batch = [bool(s.symbols) and s.symbols[0] == BATCH for s in program.inputs]
        padded = [(size, *shape[1:]) if b else shape for shape, b in zip(shapes, is_batch, strict=True)]
        key = tuple((shape, spec.dtype) for shape, spec in zip(padded, program.inputs, strict=True))
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = self._compiled(padded)
        if size == batch:
            return run

        def call(arrays: list[Any]) -> list[jax.Array]:
            full = [_fill(a, size) if b else a for a, b in zip(arrays, is_batch, strict=True)]
            return [out[:batch] for out in run(full)]

        return call

    @staticmethod
    def _batch_of(specs: Sequence[ArraySpec], shapes: Sequence[tuple[int, ...]]) -> int | None:
        return next(
            (s[0] for spec, s in zip(specs, shapes, strict=True) if spec.symbols and spec.symbols[0] == BATCH), None
        )

    def _usual_shapes(self) -> list[list[tuple[int, ...]]]:
        shapes = []
        for program in self.function.programs:
            for spec in program.inputs:
                for dim in spec.open_dims:
                    if spec.symbols[dim] != BATCH:
                        raise ConfigError(
                            f"warm_up: dim {dim} of input {spec.name!r} is open, so give the shapes that will come: "
                            f"warm_up([{{{spec.name!r}: [1, ...]}}])"
                        )
            has_batch = any(spec.open_dims for spec in program.inputs)
            for size in (self.buckets or (1,)) if has_batch else (1,):
                shapes.append([tuple(size if n is None else n for n in s.shape) for s in program.inputs])
        return shapes

    def _in_order(self, shapes: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:
        names = [s.name for s in self.function.inputs]
        if set(shapes) != set(names):
            raise ConfigError(f"warm_up: shapes for {sorted(shapes)}, the inputs are {names}")
        return [tuple(shapes[name]) for name in names]

    def _check_platform(self) -> None:
        platform = "cuda" if self.device.platform == "gpu" else self.device.platform
        if platform not in self.artifact.platforms:
            raise DeviceError(
                f"{self.artifact.prefix} was exported for {', '.join(self.artifact.platforms)}, not for {platform}; "
                f"export it with platforms=({platform!r},)"
            )

    def _check_buckets(self) -> None:
        for program in self.function.programs:
            if not any(s.symbols and s.symbols[0] == BATCH for s in program.inputs):
                raise ConfigError(
                    f"enable_batch_buckets: no input of {self.artifact.prefix} has an open batch dim; save it with "
                    "None as the first size"
                )
            for spec in program.outputs:
                if not spec.symbols or spec.symbols[0] != BATCH or any(s and BATCH in s for s in spec.symbols[1:]):
                    raise ConfigError(
                        f"enable_batch_buckets: output {spec} is not one row per sample, so padding would change it; "
                        "leave the buckets out, or save a function that returns rows"
                    )


def _fill(array: Any, size: int) -> Any:
    """The array with copies of its last row up to size rows: rows that the program can take, whatever it is."""
    lib = jnp if isinstance(array, jax.Array) else np
    return lib.concatenate([array, lib.repeat(array[-1:], size - array.shape[0], axis=0)])
