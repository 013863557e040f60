"""decorate: an optimizer whose minimize puts its Program under autocast and scales the loss.

Casts are the amp pass's; the scale is a persistable variable, and what happens to it is recorded ops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.eager.mode import no_grad
from polyreme.errors import ConfigError, ProgramError
from polyreme.ops.arithmetic import logical_not
from polyreme.ops.indices.gather import where
from polyreme.ops.manipulation import stack
from polyreme.ops.math import isfinite
from polyreme.program.gradient import Pairs, append_backward
from polyreme.program.operation import Operation
from polyreme.program.passes.mixing import amp
from polyreme.program.program import Program
from polyreme.program.training import Optimize
from polyreme.static.nn.checks import refuse
from polyreme.static.variables import create_global_var


class CustomOpLists:
    """Ops that run in the low dtype, or in float32, whatever class they are declared with.

    Raises ConfigError for custom_black_varnames: a call is cast as a whole.
    """

    white: frozenset[str]
    black: frozenset[str]

    def __init__(
        self,
        custom_white_list: Iterable[str] | None = None,
        custom_black_list: Iterable[str] | None = None,
        custom_black_varnames: Iterable[str] | None = None,
        dtype: Any = "float16",
    ) -> None:
        refuse("CustomOpLists", custom_black_varnames=(custom_black_varnames, "name ops in custom_black_list"))
        self.white, self.black = frozenset(custom_white_list or ()), frozenset(custom_black_list or ())
        self.dtype = dtypes.as_dtype(dtype).name


@dataclass(frozen=True)
class Scaling:
    """How the loss scale moves: as amp.GradScaler's settings of these names."""

    init_loss_scaling: float = 2.0**16
    incr_every_n_steps: int = 2000
    decr_every_n_nan_or_inf: int = 1
    incr_ratio: float = 2.0
    decr_ratio: float = 0.5
    dynamic: bool = True


def decorate(
    optimizer: Any,
    amp_lists: CustomOpLists | None = None,
    level: str = "O1",
    dtype: Any = "float16",
    master_weight: bool | None = None,
    master_grad: bool = False,
    init_loss_scaling: float = 2.0**16,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    use_dynamic_loss_scaling: bool | None = None,
    use_amp_guard: bool = False,
    use_promote: bool = False,
) -> OptimizerWithMixedPrecision:
    """optimizer, with a minimize that first puts the loss's Program under autocast.

    level: O1 or O2, as amp.auto_cast's. Parameters stay float32 at both, so they are their own master weights, and
    their gradients are float32 too: master_weight and master_grad change nothing. With float16 the loss is scaled; a
    step whose gradients overflow is left out. use_dynamic_loss_scaling: None for True with float16. use_promote: at O2
    an op with a float32 input runs in the low dtype nevertheless, unless it is delicate.
    Raises ConfigError for use_amp_guard, use_promote at O2 and another level.
    """
    guard = "record the part that is to be low in an amp.auto_cast block"
    promoted = use_promote and level == "O2"
    refuse("decorate", use_amp_guard=(use_amp_guard, guard), use_promote=(promoted, "take level O1, which promotes"))
    if level not in ("O1", "O2"):
        raise ConfigError(f"decorate: level={level!r}; choose 'O1' or 'O2'")
    half = dtypes.as_dtype(dtype).name
    scaling = Scaling(
        init_loss_scaling, incr_every_n_steps, decr_every_n_nan_or_inf, incr_ratio, decr_ratio,
        half == "float16" if use_dynamic_loss_scaling is None else use_dynamic_loss_scaling,
    )  # fmt: skip
    scales = half == "float16" or bool(use_dynamic_loss_scaling)
    return OptimizerWithMixedPrecision(
        optimizer, amp_lists or CustomOpLists(), level, half, scaling if scales else None
    )


class OptimizerWithMixedPrecision:
    """What decorate returns: minimize, or backward and then apply_gradients; other attributes are the optimizer's."""

    def __init__(self, optimizer: Any, lists: CustomOpLists, level: str, dtype: str, scaling: Scaling | None) -> None:
        self._optimizer, self._lists, self._level, self._dtype = optimizer, lists, level, dtype
        self._scaling = scaling
        self._scale: Any = None
        self._scaled: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)

    def amp_init(
        self, place: Any, scope: Any = None, test_program: Program | None = None, use_fp16_test: bool = False
    ) -> None:
        """Call it after the startup Program as elsewhere: parameters stay float32, so there is nothing to cast.

        test_program with use_fp16_test=True is put under autocast too.
        """
        if test_program is not None and use_fp16_test:
            self._cast(test_program)

    def get_loss_scaling(self) -> Any:
        """The scale, a persistable Variable of shape [1]. Raises ProgramError before backward, or without scaling."""
        return self._after_backward(self._scale)

    def get_scaled_loss(self) -> Any:
        """The loss times the scale, which gradients are taken of."""
        return self._after_backward(self._scaled)

    @staticmethod
    def _after_backward(value: Any) -> Any:
        if value is None:
            raise ProgramError("there is no loss scale: call minimize or backward first; bfloat16 does without one")
        return value

    def backward(
        self, loss: Any, startup_program: Any = None, parameter_list: Any = None, no_grad_set: Any = None,
        callbacks: Any = None,
    ) -> Pairs:  # fmt: skip
        """Put the Program of loss under autocast and record its gradients; -> [(parameter, scaled gradient), ...]."""
        program = loss.block.program
        name = loss._array.name
        self._cast(program)
        target = program.global_block().var(name)
        if self._scaling is not None:
            self._scale = create_global_var([1], self._scaling.init_loss_scaling, "float32", True)
            target = self._scaled = target.astype("float32") * self._scale.reshape([])
        chosen = parameter_list if parameter_list is not None else (self._optimizer.parameters_given or None)
        return append_backward(target, chosen, no_grad_set, callbacks)

    def apply_gradients(self, params_grads: Pairs) -> list[Operation]:
        """Record one step with these scaled gradients, left out when one is not finite, and the move of the scale."""
        if self._scaling is None:
            return self._optimizer.apply_gradients(params_grads)
        with no_grad():
            scale = self._after_backward(self._scale)
            plain: Pairs = [(p, g.astype("float32") / scale.reshape([1] * g.ndim)) for p, g in params_grads]
            sound = stack([isfinite(g).all() for _, g in plain]).all()
            overflowed = logical_not(sound)
            ops = self._optimizer.apply_gradients(plain)
            for op in ops:
                if isinstance(op, Optimize):
                    op.skip = overflowed._array.name
            if self._scaling.dynamic:
                _move(scale, sound, self._scaling)
        return ops

    apply_optimize = apply_gradients

    def minimize(
        self, loss: Any, startup_program: Any = None, parameter_list: Any = None, no_grad_set: Any = None
    ) -> tuple[list[Operation], Pairs]:
        """backward and apply_gradients."""
        pairs = self.backward(loss, startup_program, parameter_list, no_grad_set)
        return self.apply_gradients(pairs), pairs

    def _cast(self, program: Program) -> None:
        """Put program itself under autocast."""
        names = [v._array.name for v in program.global_block().vars.values()]
        cast = amp(program, names, self._level, self._dtype, self._lists.white, self._lists.black)
        program.blocks, program.captured = cast.blocks, cast.captured
        for block in program.blocks:
            block.program = program
        program.changed()


def _move(scale: Any, sound: Any, how: Scaling) -> None:
    """Record what a step does to the scale: arXiv:1710.03740, section 3.2."""
    good, bad = (create_global_var([1], 0, "int64", True) for _ in range(2))
    one = sound.reshape([1])
    more, fewer = where(one, good + 1, good * 0), where(one, bad * 0, bad + 1)
    grow, shrink = more >= how.incr_every_n_steps, fewer >= how.decr_every_n_nan_or_inf
    lower = (scale * how.decr_ratio).clip(min=1.0)
    new = where(grow, scale * how.incr_ratio, where(shrink, lower, scale))
    # a scale that has grown past float32 stays
    new = where(isfinite(new), new, scale)
    for target, value in ((good, where(grow, more * 0, more)), (bad, where(shrink, fewer * 0, fewer)), (scale, new)):
        state.write(target, state.read(value))
