"""Looking for NaN and infinity: in single Tensors, in all ops of some steps; and which ops ran in which dtype."""

from __future__ import annotations

import enum
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp

from polyreme.core import dtype as dtypes
from polyreme.core import mode, state
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, DTypeError, NotReadyError, NumericsError
from polyreme.flags import set_flags

_log = logging.getLogger("polyreme.numerics")


class DebugMode(enum.Enum):
    """What to do with values that are not finite: raise, log them, or log every Tensor that is looked at (CHECK_ALL)
    or that float16 could not hold (CHECK_ALL_FOR_OVERFLOW)."""

    CHECK_NAN_INF_AND_ABORT = 0
    CHECK_NAN_INF = 1
    CHECK_ALL_FOR_OVERFLOW = 2
    CHECK_ALL = 3


class TensorCheckerConfig:
    """What enable_tensor_checker looks at: the results and gradients of all ops, as FLAGS_check_nan_inf does
    (docs/numerics.md). debug_step: (first, last) of the calls of enable_tensor_checker, from 0, that switch it on, last
    not among them. stack_height_limit changes nothing: a message names the layer and the caller's line. Raises
    ConfigError for lists of ops and for files, which are not supported, and for modes that log every op's values.
    """

    enable: bool
    debug_step: Sequence[int] | None
    current_step_id: int

    def __init__(
        self,
        enable: bool,
        debug_mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT,
        output_dir: str | None = None,
        checked_op_list: Sequence[str] | None = None,
        skipped_op_list: Sequence[str] | None = None,
        debug_step: Sequence[int] | None = None,
        stack_height_limit: int = 1,
    ) -> None:
        for name, value in (
            ("output_dir", output_dir),
            ("checked_op_list", checked_op_list),
            ("skipped_op_list", skipped_op_list),
        ):
            if value:
                raise ConfigError(f"TensorCheckerConfig: {name}={value!r} is not supported; every op is looked at")
        if debug_mode not in (DebugMode.CHECK_NAN_INF_AND_ABORT, DebugMode.CHECK_NAN_INF):
            raise ConfigError(
                f"TensorCheckerConfig: {debug_mode} would log every op; call check_numerics on the Tensors to be seen"
            )
        if debug_step is not None and not (len(debug_step) == 2 and 0 <= debug_step[0] < debug_step[1]):
            raise ConfigError(f"TensorCheckerConfig: debug_step={debug_step!r}; give a first step and a later end")
        self.enable, self.debug_mode, self.debug_step = enable, debug_mode, debug_step
        self.stack_height_limit = stack_height_limit
        self.current_step_id = -1

    def update_and_check_step_id(self) -> bool:
        """Go on to the next step; whether it is looked at."""
        self.current_step_id += 1
        steps = self.debug_step
        return self.enable and (steps is None or steps[0] <= self.current_step_id < steps[1])

    def start_check_nan_inf(self) -> None:
        """Look at what ops give from now on."""
        level = 0 if self.debug_mode is DebugMode.CHECK_NAN_INF_AND_ABORT else 1
        set_flags({"FLAGS_check_nan_inf": True, "FLAGS_check_nan_inf_level": level})

    def stop_check_nan_inf(self) -> None:
        """Look no more."""
        set_flags({"FLAGS_check_nan_inf": False, "FLAGS_check_nan_inf_level": 0})


def enable_tensor_checker(checker_config: TensorCheckerConfig) -> None:
    """A training step begins: look at what its ops give, if the configuration says so."""
    if checker_config.update_and_check_step_id():
        checker_config.start_check_nan_inf()
    else:
        checker_config.stop_check_nan_inf()


def disable_tensor_checker() -> None:
    """Look no more at what ops give."""
    set_flags({"FLAGS_check_nan_inf": False, "FLAGS_check_nan_inf_level": 0})


def check_numerics(
    tensor: Tensor, op_type: str, var_name: str, debug_mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT
) -> tuple[Tensor, Tensor]:
    """Look at one Tensor -> (int64 [NaN, infinities, zeros], float32 [maximum, minimum, mean]).

    op_type, var_name: where it comes from, for messages. NaN is left out of the extremes; of no elements they are NaN.
    Raises NumericsError for NaN or infinity where the mode aborts, DTypeError for a dtype that has neither.

    >>> counts, values = check_numerics(Tensor([2.0, 0.0]), "scale", "x")
    >>> counts.tolist(), values.tolist()
    ([0, 0, 1], [2.0, 0.0, 1.0])
    """
    if not isinstance(tensor, Tensor) or not dtypes.is_floating(tensor.dtype):
        kind = tensor.dtype.name if isinstance(tensor, Tensor) else type(tensor).__name__
        raise DTypeError(f"check_numerics: {var_name} is {kind}; only floating Tensors have NaN and infinities")
    array = state.read(tensor).astype(jnp.promote_types(tensor.dtype, jnp.float32))
    counts = Tensor(jnp.stack([jnp.isnan(array).sum(), jnp.isinf(array).sum(), (array == 0).sum()]).astype(jnp.int64))
    extremes = [jnp.nanmax(array), jnp.nanmin(array), array.mean()] if array.size else [jnp.nan] * 3
    values = Tensor(jnp.asarray(extremes, jnp.float32))
    nan, inf, zero = counts.tolist()
    largest, smallest, mean = values.tolist()
    text = (
        f"{var_name} of {op_type}, {tensor.dtype.name}{list(tensor.shape)}, has {nan} NaN, {inf} infinite values and "
        f"{zero} zeros; maximum {largest:g}, minimum {smallest:g}, mean {mean:g}"
    )
    if nan or inf:
        if debug_mode is DebugMode.CHECK_NAN_INF_AND_ABORT:
            raise NumericsError(text)
        _log.error("%s", text)
    elif debug_mode is DebugMode.CHECK_ALL or (
        debug_mode is DebugMode.CHECK_ALL_FOR_OVERFLOW
        and max(abs(largest), abs(smallest)) > dtypes.finfo(dtypes.float16).max
    ):
        _log.warning("%s", text)
    return counts, values


def check_layer_numerics(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the forward of a Layer: NumericsError for NaN or infinity among the Tensors that it gets or gives."""

    @functools.wraps(func)
    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        name = type(layer).__name__
        for at, value in enumerate((*args, *kwargs.values())):
            _check(value, name, f"argument {at}")
        results = func(layer, *args, **kwargs)
        for at, value in enumerate(results if isinstance(results, (tuple, list)) else [results]):
            _check(value, name, f"result {at}")
        return results

    return forward


def _check(value: Any, op_type: str, name: str) -> None:
    if isinstance(value, Tensor) and dtypes.is_floating(value.dtype):
        check_numerics(value, op_type, name)


class _CountingMode:
    """Counts each op by the dtype of its first result."""

    def __init__(self, inner: mode.Mode) -> None:
        self.inner = inner
        self.calls: Counter[tuple[str, str]] = Counter()

    def run(self, op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        result = self.inner.run(op, args, kwargs)
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        name = first.dtype.name if isinstance(first, Tensor) else ""
        self.calls[op.name, name if name in _COLUMNS else "other"] += 1
        return result


_COLUMNS = ("float16", "bfloat16", "float32", "other")


class _Collection:
    """The collection that enable_operator_stats_collection began."""

    def __init__(self) -> None:
        self.running: Any = None


_collection = _Collection()


def enable_operator_stats_collection() -> None:
    """Count ops by dtype from now on, until disable_operator_stats_collection prints them. Inside captured functions
    they are counted when a program is made."""
    if _collection.running is not None:
        raise NotReadyError("enable_operator_stats_collection: ops are counted already; disable it first")
    _collection.running = collect_operator_stats()
    _collection.running.__enter__()


def disable_operator_stats_collection() -> None:
    """Print the ops called since enable_operator_stats_collection by dtype."""
    if _collection.running is None:
        raise NotReadyError("disable_operator_stats_collection: no ops are counted; enable it first")
    running, _collection.running = _collection.running, None
    running.__exit__(None, None, None)


@contextmanager
def collect_operator_stats() -> Iterator[None]:
    """Print the ops called inside the block by dtype of their results, as a table."""
    counting = _CountingMode(mode.current.mode)
    with mode.using(counting):
        yield
    print(_table(counting.calls))  # noqa: T201  (what it is for)


def _table(calls: Counter[tuple[str, str]]) -> str:
    names = sorted({name for name, _ in calls})
    width = max(map(len, [*names, "op"]))
    rows = [["op", *_COLUMNS], *([name, *(str(calls[name, dtype]) for dtype in _COLUMNS)] for name in names)]
    lines = ["  ".join(cell.ljust(width if at == 0 else 8) for at, cell in enumerate(row)).rstrip() for row in rows]
    return "\n".join([*lines, f"{len(names)} ops"])
