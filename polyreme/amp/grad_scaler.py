"""GradScaler: scale the loss so that float16 gradients do not vanish, and leave out steps whose gradients overflowed.

Source: arXiv:1710.03740, section 3.2.  Everything that changes is a persistent Tensor and no value is read
on the host, so a captured step may hold scale, backward, step and update.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import state
from polyreme.core.meshes import beside
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, CheckpointError, ConfigError, GradError
from polyreme.optimizer.shared import MeshGroup, by_devices

# name in the state -> dtype; update() changes the first three, the others are settings
_STATE = {
    "scale": np.float32, "incr_count": np.int32, "decr_count": np.int32, "incr_ratio": np.float32,
    "decr_ratio": np.float32, "incr_every_n_steps": np.int32, "decr_every_n_nan_or_inf": np.int32,
    "use_dynamic_loss_scaling": np.bool_,
}  # fmt: skip


class _Flight:
    """How far one optimizer is between two updates: gradients unscaled, perhaps stepped, and whether they overflowed.

    run: the capture it happened in, None when eager.
    """

    __slots__ = ("found_inf", "run", "stepped")

    def __init__(self, found: Tensor, run: Any) -> None:
        self.found_inf = found
        self.run = run
        self.stepped = False


class GradScaler:
    """Dynamic loss scaling.

    After incr_every_n_steps good steps in a row the scale is multiplied by incr_ratio, after decr_every_n_nan_or_inf
    overflowed ones by decr_ratio (never below 1). enable=False makes every method do its plain work without scaling.

        scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); optimizer.clear_grad()
    """

    def __init__(
        self,
        enable: bool = True,
        init_loss_scaling: float = 65536.0,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 2000,
        decr_every_n_nan_or_inf: int = 1,
        use_dynamic_loss_scaling: bool = True,
    ) -> None:
        self._enable = bool(enable)
        settings = {
            "scale": init_loss_scaling, "incr_count": 0, "decr_count": 0, "incr_ratio": incr_ratio,
            "decr_ratio": decr_ratio, "incr_every_n_steps": incr_every_n_steps,
            "decr_every_n_nan_or_inf": decr_every_n_nan_or_inf, "use_dynamic_loss_scaling": use_dynamic_loss_scaling,
        }  # fmt: skip
        self._init_scale = _check("scale", init_loss_scaling)
        with state.outside_capture():
            self._state = {n: Tensor(jnp.asarray(_check(n, v), _STATE[n])) for n, v in settings.items()}
        self._flights: weakref.WeakKeyDictionary[Any, _Flight] = weakref.WeakKeyDictionary()

    # a step

    def scale(self, var: Tensor) -> Tensor:
        """var times the loss scale."""
        if not isinstance(var, Tensor):
            raise ConfigError(f"GradScaler.scale takes the loss, a Tensor; got {type(var).__name__}")
        if not self._enable:
            return var
        if state.recording():
            raise GradError(
                "GradScaler.scale: in static mode use static.amp.decorate(optimizer), which scales the loss"
            )
        return var * self._beside(self._state["scale"], state.read(var)).astype(var.dtype)

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients of the optimizer's parameters by the scale and note whether one is not finite.

        float16 and bfloat16 gradients become float32, so that what the scale has saved is not lost again. For clipping
        by hand between backward and step. Raises GradError if it was done already since the last update().
        """
        if not self._enable:
            return
        self._check_not_unscaled(optimizer)
        held = [p for p in optimizer._parameters if p._grad is not None and not p.stop_gradient]
        groups = by_devices(held, lambda p: p._grad._array) if state.watch.active is None else [MeshGroup((), (*held,))]
        self.note(optimizer, [self.unscale_group(group.parameters) for group in groups])

    def unscale_group(self, parameters: Sequence[Any], scale: Tensor | None = None) -> Tensor:
        """Divide the gradients that parameters of one mesh have by the scale -> True if one is not finite, 0-D bool.

        A piece of unscale_, for a caller that compiles it for each mesh by itself: `note` takes all results. scale: the
        scale in force, copied to that mesh; by default that is done here.
        """
        trained = [p for p in parameters if p._grad is not None and not p.stop_gradient]
        if not trained:
            return Tensor(jnp.zeros((), jnp.bool_))
        grads = [state.read(p._grad) for p in trained]
        scale = self._beside(self._state["scale"], grads[0]) if scale is None else scale
        arrays, found = _unscale(grads, state.read(scale))
        for p, array in zip(trained, arrays, strict=True):
            state.write(p._grad, array)
        return Tensor(found)

    def note(self, optimizer: Any, flags: Sequence[Tensor]) -> Tensor:
        """Take down that the optimizer's gradients are unscaled; found: what unscale_group gave for each mesh.

        -> True if any of them is, on the first one's mesh: what step() skips by. Raises GradError if it was done
        already since the last update().
        """
        self._check_not_unscaled(optimizer)
        first = state.read(flags[0]) if flags else jnp.zeros((), jnp.bool_)
        if len(flags) > 1:
            first = _any([first, *(beside(state.read(f), first) for f in flags[1:])])
        flight = self._flights[optimizer] = _Flight(Tensor(first), state.watch.active)
        return flight.found_inf

    def _check_not_unscaled(self, optimizer: Any) -> None:
        if self._flight(optimizer) is not None:
            raise GradError("GradScaler.unscale_: the gradients are unscaled already; call it once before update()")

    @staticmethod
    def _beside(tensor: Tensor, other: Any) -> Tensor:
        """tensor, or a copy of it on the other array's devices."""
        have = state.read(tensor)
        array = beside(have, other)
        return tensor if array is have else Tensor(array)

    def step(self, optimizer: Any) -> None:
        """optimizer.step() with unscaled gradients; where one of them is not finite nothing changes.

        Raises GradError if this optimizer has stepped since the last update().
        """
        if not self._enable:
            optimizer.step()
            return
        flight = self._flight(optimizer)
        if flight is None:
            self.unscale_(optimizer)
            flight = self._flights[optimizer]
        elif flight.stepped:
            raise GradError("GradScaler.step: this optimizer has stepped already; call update() between two steps")
        flight.stepped = True
        optimizer.step(skip=flight.found_inf)

    def update(self) -> None:
        """Adapt the scale to whether gradients overflowed since the last update().

        Raises GradError if none were unscaled since then.
        """
        if not self._enable:
            return
        flights = [f for f in (self._flight(o) for o in list(self._flights)) if f is not None]
        if not flights:
            raise GradError("GradScaler.update: no gradients were unscaled since the last update(); call step() first")
        self._flights.clear()
        now = {n: state.read(t) for n, t in self._state.items()}
        new = _adapt([beside(state.read(f.found_inf), now["scale"]) for f in flights], now)
        for name, array in new.items():
            state.write(self._state[name], array)

    def minimize(self, optimizer: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """step() and update(), after the scaled loss's backward(); returns ([], [(parameter, gradient), ...]).

        Takes the scaled loss as optimizer.minimize does, and calls its backward() if no parameter has a gradient.
        """
        if not self._enable:
            return optimizer.minimize(*args, **kwargs)
        if set(kwargs) - {"loss"} or len(args) + len(kwargs) != 1:
            raise ConfigError(
                f"GradScaler.minimize takes the optimizer and the scaled loss, got {len(args)} more arguments and "
                f"{sorted(kwargs)}; call scale, backward, step and update for anything else"
            )
        loss = args[0] if args else kwargs["loss"]
        if all(p._grad is None for p in optimizer._parameters):
            loss.backward()
        self.step(optimizer)
        self.update()
        return [], [(p, p.grad) for p in optimizer._parameters if p._grad is not None]

    def _flight(self, optimizer: Any) -> _Flight | None:
        """What has been done for this optimizer since the last update.

        A captured function runs its Python twice, so an entry that another run of it left is not of this one.
        """
        flight = self._flights.get(optimizer)
        if flight is None or flight.run is state.watch.active:
            return flight
        if flight.run is None:
            raise CaptureError(
                "GradScaler: unscale_ or step was called before the captured function, which then continues it; put "
                "unscale_, step and update into one captured function"
            )
        if state.watch.active is None:
            raise CaptureError(
                "GradScaler: a captured function called unscale_ or step without update(); put unscale_, step and "
                "update into one captured function"
            )
        return None

    # settings

    def is_enable(self) -> bool:
        """True if losses are scaled."""
        return self._enable

    def is_use_dynamic_loss_scaling(self) -> bool:
        """True if update() changes the scale."""
        return self._enable and self._get("use_dynamic_loss_scaling")

    def get_loss_scaling(self) -> Tensor:
        """The scale in force, 0-D float32."""
        return self._state["scale"].detach()

    def get_init_loss_scaling(self) -> float:
        """The scale it began with, or was last set to."""
        return self._init_scale

    def set_init_loss_scaling(self, new_init_loss_scaling: float) -> None:
        """Begin again with this scale."""
        self._set("scale", new_init_loss_scaling)
        self._init_scale = float(new_init_loss_scaling)

    def get_incr_ratio(self) -> float:
        """Factor of the scale after a run of good steps."""
        return self._get("incr_ratio")

    def set_incr_ratio(self, new_incr_ratio: float) -> None:
        """Change the factor after a run of good steps; above 1."""
        self._set("incr_ratio", new_incr_ratio)

    def get_decr_ratio(self) -> float:
        """Factor of the scale after overflow."""
        return self._get("decr_ratio")

    def set_decr_ratio(self, new_decr_ratio: float) -> None:
        """Change the factor after overflow; below 1."""
        self._set("decr_ratio", new_decr_ratio)

    def get_incr_every_n_steps(self) -> int:
        """Number of good steps in a row that make the scale grow."""
        return self._get("incr_every_n_steps")

    def set_incr_every_n_steps(self, new_incr_every_n_steps: int) -> None:
        """Change the number of good steps that make the scale grow."""
        self._set("incr_every_n_steps", new_incr_every_n_steps)

    def get_decr_every_n_nan_or_inf(self) -> int:
        """Number of overflowed steps that make the scale shrink."""
        return self._get("decr_every_n_nan_or_inf")

    def set_decr_every_n_nan_or_inf(self, new_decr_every_n_nan_or_inf: int) -> None:
        """Change the number of overflowed steps that make the scale shrink."""
        self._set("decr_every_n_nan_or_inf", new_decr_every_n_nan_or_inf)

    def _get(self, name: str) -> Any:
        return state.host(self._state[name], f"GradScaler.get_{name}()").item()

    def _set(self, name: str, value: Any) -> None:
        self._state[name].set_value(np.asarray(_check(name, value), _STATE[name]))

    # state

    def state_dict(self) -> dict[str, Any]:
        """Scale, counters and settings as plain numbers; {} when not enabled."""
        if not self._enable:
            return {}
        return {n: state.host(t, "GradScaler.state_dict()").item() for n, t in self._state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state_dict. Raises CheckpointError, changing nothing, if keys are missing or unknown."""
        if not self._enable:
            if state_dict:
                raise CheckpointError("GradScaler(enable=False) cannot take a state; enable it, or leave the state out")
            return
        want = set(_STATE)
        if set(state_dict) != want:
            raise CheckpointError(
                f"GradScaler.load_state_dict needs {sorted(want)}; missing {sorted(want - set(state_dict))}, unknown "
                f"{sorted(set(state_dict) - want)}"
            )
        values = {n: _check(n, np.asarray(state_dict[n]).reshape(()).item()) for n in _STATE}
        for name, value in values.items():
            self._set(name, value)

    set_state_dict = load_state_dict


AmpScaler = GradScaler


@jax.jit
def _unscale(grads: list[jax.Array], scale: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """-> (gradients / scale, True if one is not finite)."""
    out, bad = [], jnp.zeros((), jnp.bool_)
    for g in grads:
        wide = g.astype(jnp.promote_types(g.dtype, jnp.float32))
        # the division first: a power of two divides exactly, and 1 / scale may be a subnormal
        wide = wide / scale.astype(wide.dtype)
        bad = bad | ~jnp.all(jnp.isfinite(wide))
        out.append(wide)
    return out, bad


@jax.jit
def _any(found: list[jax.Array]) -> jax.Array:
    return jnp.any(jnp.stack(found))


@jax.jit
def _adapt(found: list[jax.Array], now: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The new scale and counters."""
    bad, dynamic = jnp.any(jnp.stack(found)), now["use_dynamic_loss_scaling"]
    good_run = jnp.where(bad, 0, now["incr_count"] + 1)
    bad_run = jnp.where(bad, now["decr_count"] + 1, 0)
    grow, shrink = good_run >= now["incr_every_n_steps"], bad_run >= now["decr_every_n_nan_or_inf"]
    larger = now["scale"] * now["incr_ratio"]
    scale = jnp.where(grow & jnp.isfinite(larger), larger, now["scale"])
    scale = jnp.where(shrink, jnp.maximum(now["scale"] * now["decr_ratio"], 1.0), scale)
    new = {
        "scale": scale,
        "incr_count": jnp.where(grow, 0, good_run).astype(jnp.int32),
        "decr_count": jnp.where(shrink, 0, bad_run).astype(jnp.int32),
    }
    return {name: jnp.where(dynamic, value, now[name]) for name, value in new.items()}


def _check(name: str, value: Any) -> Any:
    if name == "use_dynamic_loss_scaling":
        return bool(value)
    whole = _STATE[name] is np.int32
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    low = {"incr_count": 0, "decr_count": 0, "incr_every_n_steps": 1, "decr_every_n_nan_or_inf": 1}.get(name)
    fits = not isinstance(value, bool) and isinstance(value, kinds)
    if fits and low is not None:
        fits = value >= low
    elif fits:
        fits = {"scale": value > 0 and np.isfinite(value), "incr_ratio": value > 1, "decr_ratio": 0 < value < 1}[name]
    if not fits:
        want = {"scale": "a finite number above 0", "incr_ratio": "a number above 1", "decr_ratio": "between 0 and 1"}
        raise ConfigError(f"GradScaler: {name} is {want.get(name, f'an integer of at least {low}')}, got {value!r}")
    return value
