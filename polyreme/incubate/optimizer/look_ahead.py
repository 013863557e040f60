"""LookAhead: another optimizer's steps, of which every k-th is followed by a step back towards where they began.

Source: arXiv:1907.08610, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import state
from polyreme.eager.tensor import Tensor
from polyreme.errors import CheckpointError, ConfigError, GradError
from polyreme.optimizer.groups import fraction
from polyreme.optimizer.lbfgs import LBFGS
from polyreme.optimizer.optimizer import Optimizer


class LookAhead:
    """Slow weights that move alpha of the way to the fast ones every k steps, where these then go on from.

    inner_optimizer moves the fast weights, the parameters; slow ones begin as the parameters are at the first step.
    What is not said here (get_lr, clear_grad, ...) is the inner optimizer's. A step may be captured, and skipped.

    >>> from polyreme.nn.parameter import Parameter
    >>> from polyreme.optimizer.sgd import SGD
    >>> w = Parameter(jnp.array([1.0]))
    >>> optimizer = LookAhead(SGD(0.25, [w]), alpha=0.5, k=2)
    >>> for _ in range(2):
    ...     w.sum().backward()
    ...     optimizer.step()
    ...     optimizer.clear_grad()
    >>> w.tolist()
    [0.75]
    """

    alpha: float

    def __init__(self, inner_optimizer: Any, alpha: float = 0.5, k: int = 5, name: str | None = None) -> None:
        if not isinstance(inner_optimizer, Optimizer) or isinstance(inner_optimizer, LBFGS):
            raise ConfigError(
                f"LookAhead: inner_optimizer is an optimizer whose step takes no closure, got {inner_optimizer!r}"
            )
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ConfigError(f"LookAhead: k is a whole number of at least 1, got {k!r}")
        self.alpha = 1.0 if alpha == 1 else fraction("LookAhead", "alpha", alpha)
        self.k = k
        self.inner_optimizer = inner_optimizer
        self._trained = [p for p in inner_optimizer._parameters if not p.stop_gradient]
        with state.outside_capture():
            wide = [jnp.array(p._array, jnp.promote_types(p._array.dtype, jnp.float32)) for p in self._trained]
            self._slow = [Tensor(array) for array in wide]
            self._count = Tensor(jnp.zeros((), jnp.int64))
        self._update = jax.jit(self._moved)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "inner_optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.inner_optimizer, name)

    def step(self, *, skip: Tensor | None = None) -> None:
        """The inner optimizer's step, and every k-th time the slow one. skip: as in Optimizer.step."""
        if state.recording():
            raise GradError("LookAhead.step() runs now, and static Programs record only the inner optimizer's steps")
        # the arrays that are trained: a low-precision parameter's master weight is what counts
        self.inner_optimizer.create_state()
        fast = [self.inner_optimizer.updated(p) for p in self._trained]
        before = [state.read(t) for t in fast]
        self.inner_optimizer.step(skip=skip)
        slow, after, count = self._update(
            before, [state.read(t) for t in fast], [state.read(t) for t in self._slow], state.read(self._count),
            None if skip is None else state.read(skip),
        )  # fmt: skip
        for p, tensor, mine, old, new in zip(self._trained, fast, self._slow, slow, after, strict=True):
            state.write(mine, old)
            state.write(tensor, new)
            if tensor is not p:
                state.write(p, new.astype(p._array.dtype))
        state.write(self._count, count)

    def _moved(self, before: list, after: list, slow: list, count: Any, skip: Any) -> tuple[list, list, Any]:
        new_count = count + 1
        if skip is not None:
            new_count = jnp.where(skip, count, new_count)
        is_due = (new_count % self.k == 0) & (new_count != count)
        slows, fasts = [], []
        for start, fast, old in zip(before, after, slow, strict=True):
            old = jnp.where(count == 0, start.astype(old.dtype), old)
            moved = old + self.alpha * (fast.astype(old.dtype) - old)
            slows.append(jnp.where(is_due, moved, old))
            fasts.append(jnp.where(is_due, moved.astype(fast.dtype), fast))
        return slows, fasts, new_count

    def minimize(
        self, loss: Any, startup_program: Any = None, parameters: Any = None, no_grad_set: Any = None
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """step() from the gradients that loss.backward() left, which is called first if no parameter has one.

        Raises ConfigError for a choice of parameters: slow weights are of all that the inner optimizer has.
        """
        if startup_program is not None or parameters is not None or no_grad_set is not None:
            raise ConfigError("LookAhead.minimize: give the parameters to the inner optimizer; leave the arguments out")
        if all(p._grad is None for p in self._trained):
            loss.backward()
        self.step()
        return [], [(p, p.grad) for p in self._trained if p._grad is not None]

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, `<parameter>_slow_0` for each parameter and lookahead_step."""
        slow = {f"{p.name}_slow_0": t for p, t in zip(self._trained, self._slow, strict=True)}
        return {**self.inner_optimizer.state_dict(), **slow, "lookahead_step": self._count}

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state_dict. Raises CheckpointError, changing nothing, for one of other parameters."""
        tensors = {f"{p.name}_slow_0": t for p, t in zip(self._trained, self._slow, strict=True)}
        tensors["lookahead_step"] = self._count
        for name, tensor in tensors.items():
            given = state_dict.get(name)
            if given is None or tuple(np.shape(given)) != tuple(tensor.shape):
                raise CheckpointError(f"LookAhead.set_state_dict: {name} is missing or of another shape")
        self.inner_optimizer.set_state_dict({n: v for n, v in state_dict.items() if n not in tensors})
        for name, tensor in tensors.items():
            tensor.set_value(state_dict[name])

    set_dict = set_state_dict
