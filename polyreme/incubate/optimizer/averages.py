"""Averages of parameters over the steps of a training: ModelAverage and ExponentialMovingAverage.

The averages are persistent Tensors, so `step()` or `update()` may stand in a captured training step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import CheckpointError, ConfigError
from polyreme.optimizer.groups import fraction, nonnegative

# additions after which a sum is put aside, so that a float32 term keeps 10 of its 24 bits in it
_MOST_ADDED = 16384


class _Average:
    """Arrays kept for each parameter, numbers for all of them, and the averages in place of the parameters for a while.

    arrays, numbers: their names. Subclasses say how an update goes, and what the average is.
    """

    arrays: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    def __init__(self, parameters: Sequence[Any] | None) -> None:
        owner = type(self).__name__
        listed = [] if parameters is None else list(parameters)
        if not listed or not all(isinstance(p, TensorState) for p in listed):
            raise ConfigError(f"{owner} needs parameters=, a list such as model.parameters()")
        self._parameters = [p for p in listed if not p.stop_gradient]
        with state.outside_capture():
            self._sums = {n: [_zeros(p) for p in self._parameters] for n in self.arrays}
            self._numbers = {n: Tensor(jnp.zeros((), jnp.int64)) for n in self.numbers}
        self._replaced: list[Any] = []
        self._updated = jax.jit(self.updated)

    def updated(self, values: list[Any], slots: dict[str, list[Any]], numbers: dict[str, Any]) -> tuple[dict, dict]:
        """(slots, numbers) after one more update with these values of the parameters. Pure."""
        raise NotImplementedError

    def averaged(self, kept: dict[str, Any], numbers: dict[str, Any]) -> Any:
        """The average of one parameter from what is kept of it. Pure."""
        raise NotImplementedError

    def _update(self) -> None:
        values = [state.read(p) for p in self._parameters]
        kept = {n: [state.read(t) for t in tensors] for n, tensors in self._sums.items()}
        kept, numbers = self._updated(values, kept, {n: state.read(t) for n, t in self._numbers.items()})
        for name, tensors in self._sums.items():
            for tensor, array in zip(tensors, kept[name], strict=True):
                state.write(tensor, array)
        for name, tensor in self._numbers.items():
            state.write(tensor, numbers[name])

    @contextmanager
    def apply(self, executor: Any = None, need_restore: bool = True) -> Iterator[None]:
        """Put the averages in place of the parameters inside the block, and on if not need_restore.

        executor: None; it belongs to static Programs. Raises ConfigError before the first update.
        """
        owner = type(self).__name__
        if executor is not None:
            raise ConfigError(f"{owner}.apply: executor belongs to static Programs, leave it out")
        counts = {n: state.host(t, f"{owner}.apply()") for n, t in self._numbers.items()}
        if not any(count.item() for count in counts.values()):
            raise ConfigError(f"{owner}.apply: nothing was averaged yet; call it after an update")
        if self._replaced:
            raise ConfigError(f"{owner}.apply: the averages are in place already; call restore() first")
        self._replaced = [p._array for p in self._parameters]
        for at, p in enumerate(self._parameters):
            mean = self.averaged({n: tensors[at]._array for n, tensors in self._sums.items()}, counts)
            state.write(p, _place(mean.astype(p._array.dtype), p._array))
        try:
            yield
        finally:
            if need_restore:
                self.restore()

    def restore(self, executor: Any = None) -> None:
        """Put the parameters back that apply() replaced. Raises ConfigError if it replaced none."""
        if not self._replaced:
            raise ConfigError(f"{type(self).__name__}.restore: nothing was replaced; call apply() first")
        for p, array in zip(self._parameters, self._replaced, strict=True):
            state.write(p, array)
        self._replaced = []

    def state_dict(self) -> dict[str, Tensor]:
        """Name -> Tensor: `<parameter>_<array>_0` for each array kept, and each number."""
        found = {
            f"{p.name}_{n}_0": t for n, held in self._sums.items() for p, t in zip(self._parameters, held, strict=True)
        }
        return found | dict(self._numbers)

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state_dict. Raises CheckpointError, changing nothing, if names or shapes differ."""
        tensors = self.state_dict()
        shapes = {n: tuple(np.shape(v.numpy() if isinstance(v, Tensor) else v)) for n, v in state_dict.items()}
        wrong = [n for n in {*tensors, *shapes} if n not in tensors or shapes.get(n) != tuple(tensors[n].shape)]
        if wrong:
            raise CheckpointError(
                f"{type(self).__name__}.set_state_dict: {sorted(wrong)[:10]} missing, unknown or of another shape"
            )
        for name, tensor in tensors.items():
            tensor.set_value(state_dict[name])


class ModelAverage(_Average):
    """The mean of each parameter over a window of its latest values; call step() after the optimizer's.

    The window is cut when it holds at least min_average_window values and at least
    min(max_average_window, average_window_rate * updates so far); the values before the cut count until the next one.
    minimize() is step(): the parameters are another optimizer's to change. Those made with
    ParamAttr(do_model_average=False) are left out.

    >>> from polyreme.nn.parameter import Parameter
    >>> w = Parameter(jnp.array([1.0]))
    >>> average = ModelAverage(1.0, [w], min_average_window=2, max_average_window=10)
    >>> for value in (1.0, 3.0):
    ...     w.set_value(np.array([value], "float32"))
    ...     average.step()
    >>> with average.apply():
    ...     w.tolist()
    [2.0]
    >>> w.tolist()
    [3.0]
    """

    arrays: tuple[str, ...] = ("sum_1", "sum_2", "sum_3")
    numbers: tuple[str, ...] = (
        "num_updates",
        "num_accumulates",
        "old_num_accumulates",
    )

    def __init__(
        self,
        average_window_rate: float,
        parameters: Sequence[Any] | None = None,
        min_average_window: int = 10000,
        max_average_window: int = 10000,
        name: str | None = None,
    ) -> None:
        self._rate = nonnegative("ModelAverage", "average_window_rate", average_window_rate)
        for what, given in (("min_average_window", min_average_window), ("max_average_window", max_average_window)):
            if isinstance(given, bool) or not isinstance(given, int) or given < 1:
                raise ConfigError(f"ModelAverage: {what} is a whole number of at least 1, got {given!r}")
        self._least, self._most = min_average_window, max_average_window
        if parameters is not None:
            parameters = [p for p in parameters if getattr(p, "do_model_average", True)]
        super().__init__(parameters)

    def updated(
        self, values: list[Any], slots: dict[str, list[Any]], numbers: dict[str, Any]
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        updates, count = numbers["num_updates"] + 1, numbers["num_accumulates"] + 1
        window = jnp.minimum(self._most, jnp.floor(updates * self._rate).astype(updates.dtype))
        cut, full = (count >= self._least) & (count >= window), updates % _MOST_ADDED == 0
        result: dict[str, list[Any]] = {n: [] for n in self.arrays}
        for value, a, b, c in zip(values, *(slots[n] for n in self.arrays), strict=True):
            a = a + value.astype(a.dtype)
            b, a = jnp.where(full, a + b, b), jnp.where(full, 0, a)
            result["sum_3"].append(jnp.where(cut, a + b, c))
            result["sum_1"].append(jnp.where(cut, 0, a))
            result["sum_2"].append(jnp.where(cut, 0, b))
        old = jnp.where(cut, count, numbers["old_num_accumulates"])
        return result, {"num_updates": updates, "num_accumulates": jnp.where(cut, 0, count), "old_num_accumulates": old}

    def averaged(self, kept: dict[str, Any], numbers: dict[str, Any]) -> Any:
        count = numbers["num_accumulates"] + numbers["old_num_accumulates"]
        return (kept["sum_1"] + kept["sum_2"] + kept["sum_3"]) / count.astype(kept["sum_1"].dtype)

    def step(self) -> None:
        """Take the parameters' present values into the average."""
        self._update()

    def minimize(self, loss: Any, startup_program: Any = None, parameters: Any = None, no_grad_set: Any = None) -> None:
        """step(); nothing is minimized. Raises ConfigError for arguments that would choose other parameters."""
        if startup_program is not None or parameters is not None or no_grad_set is not None:
            raise ConfigError("ModelAverage.minimize: parameters are given when it is made; leave the arguments out")
        self.step()

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Forget every parameter's gradient; with set_to_zero, `.grad` then reads as zeros."""
        for p in self._parameters:
            p.clear_grad(set_to_zero)


class ExponentialMovingAverage(_Average):
    """average = decay * average + (1 - decay) * p of each parameter, from zero; update() after the optimizer's step.

    What apply() puts in place is average / (1 - decay^updates), as in arXiv:1412.6980, section 3. warm_up: decay is
    min(decay, (1 + updates) / (10 + updates)), and the average starts from the parameters' first values. For static
    Programs: static.ExponentialMovingAverage.

    >>> from polyreme.nn.parameter import Parameter
    >>> w = Parameter(jnp.array([1.0]))
    >>> average = ExponentialMovingAverage([w], decay=0.5)
    >>> for value in (1.0, 4.0):
    ...     w.set_value(np.array([value], "float32"))
    ...     average.update()
    >>> with average.apply():
    ...     w.tolist()
    [3.0]
    """

    arrays: tuple[str, ...] = ("ema",)
    numbers: tuple[str, ...] = ("num_updates",)

    def __init__(
        self,
        parameters: Sequence[Any] | None = None,
        decay: float = 0.999,
        warm_up: bool = False,
        name: str | None = None,
    ) -> None:
        self._decay = fraction("ExponentialMovingAverage", "decay", decay)
        self._warm_up = bool(warm_up)
        super().__init__(parameters)

    def updated(
        self, values: list[Any], slots: dict[str, list[Any]], numbers: dict[str, Any]
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        before = numbers["num_updates"]
        decay = jnp.asarray(self._decay)
        if self._warm_up:
            decay = jnp.where(before == 0, 0, jnp.minimum(decay, (1 + before) / (10 + before)))
        made = []
        for value, average in zip(values, slots["ema"], strict=True):
            share = decay.astype(jnp.finfo(average.dtype).dtype)
            made.append(average * share + value.astype(average.dtype) * (1 - share))
        return {"ema": made}, {"num_updates": before + 1}

    def averaged(self, kept: dict[str, Any], numbers: dict[str, Any]) -> Any:
        if self._warm_up:
            return kept["ema"]
        return kept["ema"] / (1 - self._decay ** int(numbers["num_updates"]))

    def update(self) -> None:
        """Take the parameters' present values into the average."""
        self._update()


def _zeros(p: Any) -> Tensor:
    """Zeros like a parameter, at least float32, on its devices."""
    array = jnp.zeros(p._array.shape, jnp.promote_types(p._array.dtype, jnp.float32))
    return Tensor(_place(array, p._array))


def _place(array: Any, like: Any) -> Any:
    return put(array, like.sharding) if not isinstance(like, state.Tracer) and like.committed else array
