"""CompiledProgram: a Program made ready to run, on one device or with its batch split over several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from polyreme import flags
from polyreme.core.devices import place as places
from polyreme.errors import ConfigError, DeviceError, ProgramError
from polyreme.program.executor import Executor
from polyreme.program.feed import current_name, fetched
from polyreme.program.operation import Call, Operation
from polyreme.program.padded_rows import PADDING_SEEN, PaddedReplay, RowPadding, padded
from polyreme.program.parallel import MEAN, SUM, ParallelRun
from polyreme.program.parts import Feeds, parts_of
from polyreme.program.program import Program
from polyreme.program.scope import Scope
from polyreme.program.training import Backward
from polyreme.program.values import Ref
from polyreme.static.strategies import BuildStrategy, ExecutionStrategy, GradientScaleStrategy


@dataclass(frozen=True)
class _Parallel:
    """What with_data_parallel was given."""

    loss: str | None
    scale: GradientScaleStrategy
    repeat: int
    share: CompiledProgram | None
    places: tuple[Any, ...] | None


class CompiledProgram:
    """A Program as it is now, to be given to Executor.run. Changing the Program afterwards is an error when it is run.

    >>> program = Program()
    >>> CompiledProgram(program).with_data_parallel() is not None
    True
    """

    def __init__(self, program_or_graph: Program, build_strategy: BuildStrategy | None = None) -> None:
        if not isinstance(program_or_graph, Program):
            raise TypeError(f"CompiledProgram takes a Program, got {type(program_or_graph).__name__}")
        self._program = program_or_graph
        self._identity = program_or_graph.identity
        self._build = _used("build_strategy", build_strategy, BuildStrategy)
        self._parallel: _Parallel | None = None
        self._runs = program_or_graph
        self._devices: tuple = ()
        self._scope: Scope | None = None

    def with_data_parallel(
        self,
        loss_name: str | None = None,
        build_strategy: BuildStrategy | None = None,
        exec_strategy: ExecutionStrategy | None = None,
        share_vars_from: CompiledProgram | None = None,
        places: Sequence[Any] | None = None,
    ) -> CompiledProgram:
        """Split each batch over places, and average the gradients of parameters; returns itself.

        loss_name: what is minimized; needed if the Program has a backward. build_strategy: instead of the one given
        before. share_vars_from: another such CompiledProgram, which has run: this one runs in its scope. places: None
        for all GPUs of an Executor on a GPU, or CPU_NUM (1 if not set) processors.

        Executor.run then takes one feed, of which each array is cut evenly along dim 0 (the last device also gets the
        rest), or a list with a feed for each device. What is fetched is each device's result, one after the other along
        dim 0, so that a loss has one entry for each device. Values that a run changes other than by an optimizer, such
        as batch statistics (unless BuildStrategy.sync_batch_norm), are the first device's. Raises ProgramError for a
        second call and what cannot be split.
        """
        self._check_unchanged()
        if self._parallel is not None:
            raise ProgramError("with_data_parallel was called before; make a new CompiledProgram")
        if build_strategy is not None:
            self._build = _used("build_strategy", build_strategy, BuildStrategy)
        execution = _used("exec_strategy", exec_strategy, ExecutionStrategy)
        loss = self._loss(loss_name)
        if share_vars_from is not None and not isinstance(share_vars_from, CompiledProgram):
            raise TypeError(
                f"share_vars_from is a CompiledProgram, got {type(share_vars_from).__name__}; give the one it follows"
            )
        if share_vars_from is not None and share_vars_from._parallel is None:
            raise ProgramError("share_vars_from: that CompiledProgram has no with_data_parallel")
        scale = self._build.gradient_scale_strategy
        if execution.num_iteration_per_run < 1:
            raise ConfigError(
                f"ExecutionStrategy.num_iteration_per_run is at least 1, got {execution.num_iteration_per_run}"
            )
        chosen = None if places is None else tuple(places)
        self._parallel = _Parallel(loss, scale, execution.num_iteration_per_run, share_vars_from, chosen)
        if scale is GradientScaleStrategy.Customized and loss is not None:
            self._runs = _started_from_feed(self._program, loss)
        return self

    def _loss(self, name: str | None) -> str | None:
        targets = {n for op in self._program.every_op() if isinstance(op, Backward) for n in op.targets}
        if name is None:
            if targets:
                raise ProgramError(
                    f"with_data_parallel: the Program has the gradient of {sorted(targets)}; give loss_name"
                )
            return None
        if not isinstance(name, str):
            raise TypeError(f"loss_name is the name of a Variable, got {type(name).__name__}; give loss.name")
        loss = current_name(self._program, name, "loss_name")
        if targets and loss not in targets:
            raise ProgramError(f"loss_name={name!r}, but the Program has the gradient of {sorted(targets)}")
        return loss

    def _check_unchanged(self) -> None:
        if self._program.identity != self._identity:
            raise ProgramError(
                "the Program was changed after it was compiled; make a CompiledProgram of it once it is finished"
            )

    @property
    def program(self) -> Program:
        """The Program it was made of."""
        return self._program

    def devices(self, place: Any = None) -> tuple[Any, ...]:
        """The jax devices that batches are split over, chosen once: those of places, else of an Executor's place."""
        if self._parallel is None:
            raise ProgramError("a CompiledProgram without with_data_parallel runs where its Executor does")
        if not self._devices:
            self._devices = _devices(self._parallel.places, place)
        return self._devices

    # what an Executor calls

    def execute(self, executor: Executor, feed: Any, fetch_list: Any, scope: Scope, return_numpy: bool) -> list[Any]:
        """Run it: see Executor.run."""
        self._check_unchanged()
        if self._parallel is None:
            return executor.run_program(self._program, feed, fetch_list, scope, return_numpy)
        scope = self._settled(self._parallel, executor, scope)
        feeds = parts_of(self._runs, {} if feed is None else feed, len(self._devices))
        names = fetched(self._program, fetch_list)
        run, feeds = self._padded_run(self._parallel, executor, feeds, names, scope) or (
            self._run_for(self._parallel, executor, feeds, names, scope),
            feeds,
        )
        outs = run(feeds)
        for _ in range(self._parallel.repeat - 1):
            outs = run(feeds)
        return [np.asarray(out) for out in outs] if return_numpy else outs

    def _settled(self, parallel: _Parallel, executor: Executor, scope: Scope) -> Scope:
        """The scope to run in."""
        self.devices(executor.place)
        if parallel.share is not None:
            if parallel.share._scope is None:
                raise ProgramError("share_vars_from: that CompiledProgram has not run yet; run it first")
            if parallel.share._devices != self._devices:
                raise ProgramError(
                    f"share_vars_from runs on {len(parallel.share._devices)} devices, this one on "
                    f"{len(self._devices)}; give both the same places"
                )
            scope = parallel.share._scope
        self._scope = scope
        return scope

    def _padded_run(
        self, parallel: _Parallel, executor: Executor, feeds: Feeds, names: list[str], scope: Scope
    ) -> tuple[ParallelRun, Feeds] | None:
        """What runs sequences padded with rows, and the feeds for it; None without sequences, and where padding would
        be seen."""
        sizes = RowPadding.of(self._runs).sizes_of_parts(feeds.parts) if feeds.parts else {}
        which = ("parallel", self._runs.identity, scope.identity, tuple(names))
        if not sizes or not executor.pads(which):
            return None
        replay = PaddedReplay(self._runs, feeds.parts, sizes)
        filled = feeds.padded(lambda part: padded(part, sizes))
        try:
            run = self._run_for(parallel, executor, filled, names, scope, replay)
        except PADDING_SEEN as error:
            executor.run_as_fed(which, error)
            return None
        return (run, filled) if run.fits(feeds) else None

    def _run_for(
        self, parallel: _Parallel, executor: Executor, feeds: Feeds, names: list[str], scope: Scope,
        padding: PaddedReplay | None = None,
    ) -> ParallelRun:  # fmt: skip
        sync, kind = self._build.sync_batch_norm, "parallel" if padding is None else "padded"
        about = (kind, self._runs.identity, parallel.scale, sync, self._devices, tuple(names), feeds.key)
        run = executor.compiled((scope.identity, *about), feeds)
        if run is None:
            reduce = MEAN if parallel.scale is GradientScaleStrategy.CoeffNumDevice else SUM
            run = ParallelRun(self._runs, scope, feeds, names, self._devices, reduce, sync, padding)
            executor.keep((scope.identity, *about), run)
        return run


def _used(what: str, strategy: Any, kind: type) -> Any:
    found = kind() if strategy is None else strategy
    if not isinstance(found, kind):
        raise TypeError(f"{what} is a {kind.__name__}, got {type(found).__name__}")
    found.use()
    return found


def _started_from_feed(program: Program, loss: str) -> Program:
    """program with the gradient of loss fed, a number for each device, as `<loss>@GRAD`."""
    copied = program.rewritten(list)
    block = copied.global_block()
    like = block.vars[loss]
    variable = block.create_var(f"{loss}@GRAD", [None], like.dtype)
    variable.is_data = True
    start = block.create_var(None, like.shape, like.dtype)
    ops: list[Operation] = []
    for op in block.ops:
        if isinstance(op, Backward) and loss in op.targets:
            begins = op.starts or [None] * len(op.targets)
            op = replace(op, starts=[start.name if t == loss else s for t, s in zip(op.targets, begins, strict=True)])
            ops.append(Call(name="reshape", args=(Ref(variable.name), list(like.shape)), outputs=[start.name]))
        ops.append(op)
    block.ops[:] = ops
    copied.changed()
    return copied


def _devices(chosen: tuple[Any, ...] | None, place: Any) -> tuple:
    """The devices of places; those of the Executor's platform if there are none."""
    if chosen is None:
        where = places.default_place() if place is None else place
        if not where.is_cpu_place():
            return tuple(jax.local_devices(backend=where.device().platform))
        return _processors(flags.cpu_num() or 1)
    listed = [places.as_place(p) for p in chosen]
    if not listed or len({p.platform for p in listed}) > 1:
        raise ConfigError(f"with_data_parallel: places={listed}; give one place or more, all of one platform")
    if all(p.is_cpu_place() and p.index == 0 for p in listed):
        return _processors(len(listed))  # a list of so many CPUPlace()
    devices = tuple(p.device() for p in listed)
    if len(set(devices)) < len(devices):
        raise ConfigError(f"with_data_parallel: places={listed} names a device twice")
    return devices


def _processors(count: int) -> tuple:
    devices = jax.local_devices(backend="cpu")
    if count > len(devices):
        raise DeviceError(
            f"with_data_parallel on {count} processors, but this process has {len(devices)}; set CPU_NUM={count} in "
            "the environment before polyreme is imported"
        )
    return tuple(devices[:count])


__all__ = ["BuildStrategy", "CompiledProgram", "ExecutionStrategy"]
