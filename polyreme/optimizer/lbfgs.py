"""LBFGS: a quasi-Newton method that asks for the loss itself, several times a step.

Source: Nocedal and Wright, Numerical Optimization, 2nd edition, algorithm 7.5; defaults, first step and
stopping rules as in PyTorch and PaddlePaddle. The loop runs on the host, which reads a few numbers each evaluation;
what it computes with arrays is compiled, and the closure may be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, CheckpointError, ConfigError, GradError
from polyreme.optimizer import line_search
from polyreme.optimizer.groups import nonnegative
from polyreme.optimizer.lr import LRScheduler
from polyreme.optimizer.optimizer import Optimizer
from polyreme.optimizer.quasi_newton import CurvaturePairs, direction, no_history, remembered, with_room
from polyreme.optimizer.update import called_weakly, compile_gradient, wide
from polyreme.regularizer import L1Decay, L2Decay

_FIRST_ROOM = 8  # pairs; the room for them doubles when it is full, so that few sizes are compiled
_LONGEST_SEARCH = 25  # evaluations in one line search
_COUNTS = ("func_evals", "n_iter")  # over all steps: calls of closures, iterations
_KEPT = ("steps", "changes", "count", "scale", "move", "gradient")


class LBFGS(Optimizer):
    """Limited-memory BFGS. `step(closure)`: closure clears the gradients, computes the loss, calls backward() on it and
    returns it, up to max_iter times, and no further once it has called it max_eval times (max_iter * 5 / 4 if None); a
    line search that has begun is finished.

    Stops early where no gradient is above tolerance_grad, or where the loss or every parameter changes by less than
    tolerance_change. history_size: pairs of vectors the size of all parameters that are kept. line_search_fn: None
    (steps of learning_rate) or "strong_wolfe" (learning_rate is the first trial). A weight decay is part of what is
    minimized. Raises ConfigError for rates of groups, and for a clip or a regularizer of another kind with a line
    search, which needs the function whose gradient it follows.

    >>> from polyreme.nn.parameter import Parameter
    >>> w = Parameter(jnp.array([3.0, -1.0]))
    >>> optimizer = LBFGS(line_search_fn="strong_wolfe", parameters=[w])
    >>> def closure():
    ...     optimizer.clear_grad()
    ...     loss = ((w - 1) ** 4).sum()
    ...     loss.backward()
    ...     return loss
    >>> optimizer.step(closure).item(), bool(abs(w.numpy() - 1).max() < 0.05)
    (32.0, True)
    """

    def __init__(
        self,
        learning_rate: float | LRScheduler = 1.0,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 100,
        line_search_fn: str | None = None,
        parameters: Sequence[Any] | None = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        self._most_iterations = _count("max_iter", max_iter)
        self._most_evaluations = max_iter * 5 // 4 if max_eval is None else _count("max_eval", max_eval)
        self._flat = nonnegative("LBFGS", "tolerance_grad", tolerance_grad)
        self._still = nonnegative("LBFGS", "tolerance_change", tolerance_change)
        self._most_pairs = _count("history_size", history_size)
        if line_search_fn not in (None, "strong_wolfe"):
            raise ConfigError(f"LBFGS: line_search_fn is None or 'strong_wolfe', got {line_search_fn!r}")
        self._searches = line_search_fn is not None
        self._memory: dict[str, Any] = {}
        self._counts = dict.fromkeys(_COUNTS, 0)
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name)
        self._check_groups()

    def _check_groups(self) -> None:
        for p in self._parameters:
            options = self._options(p)
            if options.lr_factor != 1:
                raise ConfigError(f"LBFGS: {p.name} has learning rate factor {options.lr_factor}; all move by one step")
            regularizer = options.regularizer
            if self._searches and not isinstance(regularizer, (L1Decay, L2Decay, type(None))):
                raise ConfigError(
                    f"LBFGS: line_search_fn='strong_wolfe' needs the value of the penalty {regularizer!r}, which only "
                    "L1Decay and L2Decay have; add it to the loss in the closure"
                )
            if self._searches and self._clip_of[id(p)] is not None:
                raise ConfigError(
                    "LBFGS: a clipped gradient is not the loss's, and line_search_fn='strong_wolfe' would not find its "
                    "conditions met; leave grad_clip out or use line_search_fn=None"
                )

    def step(self, closure: Callable[[], Tensor] | None = None, *, skip: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Iterate as the settings say; -> the loss before it, the closure's first.

        Raises ConfigError without a closure or with skip=, CaptureError in a captured function.
        """
        if state.recording():
            raise GradError("LBFGS.step() runs now; in static mode use incubate.optimizer.functional.minimize_lbfgs")
        if state.capturing():
            raise CaptureError("LBFGS.step() decides on the host when to stop; capture the closure, not the step")
        if not callable(closure) or skip is not None:
            raise ConfigError("LBFGS: step(closure) takes a function that computes the loss and its gradients, alone")
        run = _StepRun(self, closure)
        self._memory = run.iterate(self._memory)
        self._counts["func_evals"] += run.evaluations
        self._counts["n_iter"] += run.iterations
        return run.first_loss

    def minimize(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises ConfigError: the loss must be computed several times; call step(closure)."""
        raise ConfigError("LBFGS.minimize has only one value of the loss; call step(closure)")

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Raises ConfigError: the directions kept are over all parameters at once."""
        raise ConfigError("LBFGS keeps directions over all of its parameters; give all of them when it is made")

    def state_dict(self) -> dict[str, Any]:
        """Name -> Tensor: lbfgs_steps and lbfgs_changes (the pairs), lbfgs_count, lbfgs_scale, lbfgs_move,
        lbfgs_gradient; master weights and LR_Scheduler as in every optimizer. "state" counts calls of closures,
        "func_evals", and iterations, "n_iter".
        """
        kept = {f"lbfgs_{n}": Tensor(a) for n, a in self._memory.items()}
        return {**super().state_dict(), **kept, "state": dict(self._counts)}

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state_dict. Raises CheckpointError, changing nothing, for one of other parameters."""
        names = {f"lbfgs_{n}": n for n in _KEPT}
        values = {
            names[k]: np.asarray(v.numpy() if isinstance(v, Tensor) else v) for k, v in state_dict.items() if k in names
        }
        if values and set(values) != set(_KEPT):
            raise CheckpointError(f"LBFGS.set_state_dict: lacks {sorted(set(_KEPT) - set(values))} of lbfgs_*")
        n = sum(p.size for p in self._parameters if not p.stop_gradient)
        for name in ("move", "gradient"):
            if values and values[name].shape != (n,):
                raise CheckpointError(
                    f"LBFGS.set_state_dict: lbfgs_{name} has shape {list(values[name].shape)}, the parameters have {n} "
                    "elements"
                )
        super().set_state_dict({k: v for k, v in state_dict.items() if k not in names and k != "state"})
        self._counts |= {k: int(v) for k, v in state_dict.get("state", {}).items() if k in _COUNTS}
        self._memory = {name: jnp.asarray(a) for name, a in values.items()}

    def state_arrays(self, names: Mapping[int, str]) -> dict[str, jax.Array]:
        """Raises ConfigError: there is no state per parameter that a sharded checkpoint could keep."""
        raise ConfigError("LBFGS keeps vectors over all parameters; save state_dict() in place of a sharded checkpoint")

    # what _StepRun asks of it

    def evaluate(self, closure: Callable[[], Tensor], live: list[Any]) -> tuple[Tensor, Any, Any]:
        """(the closure's loss, that with penalties as an array, the gradient in a row)."""
        with tape.GradEnabled(True):
            loss = closure()
        if not isinstance(loss, TensorState) or loss._array.size != 1:
            got = list(loss._array.shape) if isinstance(loss, TensorState) else type(loss).__name__
            raise ConfigError(f"LBFGS: closure must return the loss, a Tensor with one element, got {got}")
        key = ("gradient", tuple((self._options(p), p.dtype, id(p) in self._masters) for p in live))
        compiled = self._updates.get(key)
        if compiled is None:
            leaves = self._leaves(live)
            compiled = self._updates[key] = compile_gradient(leaves, called_weakly(self.prepare))
        params = [state.read(self.updated(p)) for p in live]
        grads = [jnp.zeros(p._array.shape, p.dtype) if p._grad is None else state.read(p._grad) for p in live]
        gradient = compiled(params, grads)
        value = state.read(loss).reshape(()).astype(gradient.dtype)
        for p, array in zip(live, params, strict=True):
            value = value + self._penalty(p, wide(array))
        return loss, value, gradient

    def _penalty(self, p: Any, value: jax.Array) -> Any:
        options = self._options(p)
        if isinstance(options.regularizer, L1Decay):
            return options.regularizer.coeff * jnp.abs(value).sum()
        coefficient = options.regularizer.coeff if isinstance(options.regularizer, L2Decay) else options.weight_decay
        return coefficient / 2 * (value * value).sum() if coefficient else 0.0

    def position(self, live: list[Any]) -> Any:
        """All parameters in a row, master weights where there are."""
        return _join([state.read(self.updated(p)) for p in live])

    def move_to(self, live: list[Any], position: Any) -> None:
        """Set all parameters."""
        at = 0
        for p in live:
            piece = position[at : at + p.size].reshape(p._array.shape)
            at += p.size
            master = self._masters.get(id(p))
            if master is not None:
                state.write(master, _like(piece, master._array))
            state.write(p, _like(piece, p._array))


class _StepRun:
    """One call of step."""

    def __init__(self, owner: LBFGS, closure: Callable[[], Tensor]) -> None:
        self.owner, self.closure = owner, closure
        self.live = [p for p in owner._parameters if not p.stop_gradient]
        if len(owner._ensure_state(self.live)) > 1:
            raise ConfigError("LBFGS: the parameters lie on several meshes, as under a pipeline; use another optimizer")
        self.first_loss, self.value, self.gradient = owner.evaluate(closure, self.live)
        self.evaluations = 1
        self.iterations = 0

    def iterate(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Run the iterations; -> what the next call starts from."""
        owner, rate = self.owner, self.owner.get_lr()
        if _largest(self.gradient) <= owner._flat:
            return saved
        for iteration in range(owner._most_iterations):
            history = self._history(saved)
            way, slope, length = _next_way(history, self.gradient)
            first = not saved
            trial = min(1.0, 1.0 / float(length)) * rate if first else rate
            if not float(slope) < -owner._still:
                break
            self.iterations += 1
            before, gradient = self.value, self.gradient
            is_last = iteration + 1 == owner._most_iterations
            move = self._search(way, slope, trial) if owner._searches else self._go(way, trial, is_last)
            saved = {**history._asdict(), "move": move, "gradient": gradient}
            if self.evaluations >= owner._most_evaluations or _largest(self.gradient) <= owner._flat:
                break
            if _largest(move) <= owner._still or abs(float(self.value) - float(before)) < owner._still:
                break
        return saved

    def _history(self, saved: dict[str, Any]) -> CurvaturePairs:
        """The pairs with the last move's, once its gradient is known."""
        n, most = self.gradient.shape[0], self.owner._most_pairs
        if not saved:
            return no_history(min(_FIRST_ROOM, most), n, self.gradient.dtype)
        history = CurvaturePairs(*(saved[name] for name in CurvaturePairs._fields))
        room = history.steps.shape[0]
        if room < most and int(history.count) == room:
            history = with_room(history, min(2 * room, most))
        return _remembered(history, saved["move"], self.gradient - saved["gradient"])

    def _go(self, way: Any, step: float, is_last: bool) -> Any:
        move = way * jnp.asarray(step, way.dtype)
        self.owner.move_to(self.live, self.owner.position(self.live) + move)
        if not is_last:  # the next call begins with an evaluation
            _, self.value, self.gradient = self.owner.evaluate(self.closure, self.live)
            self.evaluations += 1
        return move

    def _search(self, way: Any, slope: Any, step: float) -> Any:
        """Along way to a point that meets the strong Wolfe conditions; -> how far that is."""
        start, owner = self.owner.position(self.live), self.owner
        search = line_search.begin(self.value, slope, self.gradient, step)
        tried = None
        while int(search.stage) != line_search.DONE:
            tried = search.step
            owner.move_to(self.live, start + tried * way)
            _, value, gradient = owner.evaluate(self.closure, self.live)
            self.evaluations += 1
            search = _advance(search, value, gradient, way, _LONGEST_SEARCH, owner._still)
        found = search.low
        self.value, self.gradient = found.value, found.gradient
        move = found.step * way
        if float(found.step) != float(tried):  # type: ignore[arg-type]
            owner.move_to(self.live, start + move)
        return move


@jax.jit
def _next_way(history: CurvaturePairs, gradient: Any) -> tuple[Any, Any, Any]:
    way = direction(history, gradient)
    return way, jnp.vdot(gradient, way), jnp.abs(gradient).sum()


@jax.jit
def _advance(search: Any, value: Any, gradient: Any, way: Any, most: Any, shortest: Any) -> Any:
    return line_search.advance(search, value, jnp.vdot(gradient, way), gradient, most, shortest)


_remembered = jax.jit(remembered)


@jax.jit
def _join(arrays: list[Any]) -> Any:
    return jnp.concatenate([wide(a).reshape(-1) for a in arrays])


def _like(piece: Any, array: Any) -> Any:
    """piece in the dtype and on the devices of array."""
    piece = piece.astype(array.dtype)
    return put(piece, array.sharding) if array.committed else piece


def _largest(x: Any) -> float:
    return float(jnp.abs(x).max()) if x.size else 0.0


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"LBFGS: {name} is a whole number of at least 1, got {value!r}")
    return value
