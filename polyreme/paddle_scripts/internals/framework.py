"""paddle.base.framework and its neighbours: modes, places, tracing switches, and LayerHelper."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from polyreme import flags
from polyreme.core import amp_policy, state
from polyreme.core import dtype as dtypes
from polyreme.core.devices import place as places
from polyreme.eager.tape import grad_mode
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import AbsentError
from polyreme.nn.layer import Layer
from polyreme.paddle_scripts.internals.core import AmpLevel
from polyreme.program.current import defaults
from polyreme.program.mode import in_dynamic_mode
from polyreme.program.program import Program
from polyreme.root import as_tensor


def in_pir_mode() -> bool:
    """Whether code is recorded into a Program: there ops are called as they are in PaddlePaddle's PIR mode."""
    return not in_dynamic_mode()


def in_dynamic_or_pir_mode() -> bool:
    """True: both modes call ops."""
    return True


def in_pir_executor_mode() -> bool:
    """False: an Executor runs one program that XLA has compiled."""
    return False


in_cinn_mode = in_pir_executor_mode


def use_pir_api() -> bool:
    """False: a saved Program's file is PREFIX.pdmodel here, as before PIR."""
    return False


def in_declarative_mode() -> bool:
    """Whether the code runs while to_static captures it."""
    return state.capturing() and not state.recording()


def _current_expected_place() -> places.Place:
    return places.default_place()


def _set_expected_place(place: Any) -> None:
    places.set_device(place)


def _get_paddle_place(place: Any) -> places.Place | None:
    return None if place is None else places.as_place(place)


class _Tracer:
    """What scripts ask of the tracer: autocast in force, and whether ops are taped, which may be set."""

    @property
    def _amp_level(self) -> AmpLevel:
        policy = amp_policy.active.policy
        return AmpLevel.O0 if policy is None else AmpLevel[policy.level]

    @property
    def _amp_dtype(self) -> str:
        policy = amp_policy.active.policy
        return "float32" if policy is None else policy.low.name

    @property
    def _has_grad(self) -> bool:
        return grad_mode.enabled

    @_has_grad.setter
    def _has_grad(self, value: bool) -> None:
        grad_mode.enabled = bool(value)

    def _get_amp_op_list(self) -> tuple[set[str], set[str]]:
        policy = amp_policy.active.policy
        return (set(), set()) if policy is None else (set(policy.white), set(policy.black))


_TRACER = _Tracer()


def amp_state() -> dict[str, Any] | None:
    """Level and dtype of the autocast in force, None without one."""
    level = _TRACER._amp_level
    return None if level is AmpLevel.O0 else {"level": level.name, "dtype": _TRACER._amp_dtype}


def _dygraph_tracer() -> _Tracer | None:
    """None in static mode."""
    return _TRACER if in_dynamic_mode() else None


def _no_check_dy2st_diff() -> AbstractContextManager[None]:
    return nullcontext()


def dygraph_only(func: Callable[..., Any]) -> Callable[..., Any]:
    """func, which raises RuntimeError in static mode."""

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not in_dynamic_mode():
            raise RuntimeError(f"{func.__name__} runs in dynamic mode only; call disable_static() first")
        return func(*args, **kwargs)

    return run


def static_only(func: Callable[..., Any]) -> Callable[..., Any]:
    """func, which raises RuntimeError outside of static mode."""

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        if in_dynamic_mode():
            raise RuntimeError(f"{func.__name__} runs in static mode only; call enable_static() first")
        return func(*args, **kwargs)

    return run


dygraph_not_support = static_only
non_static_only = dygraph_only


def unified(fn: Callable[..., Any] | None = None, **_: Any) -> Any:
    """fn itself: the same code runs eagerly and captured."""
    return (lambda func: func) if fn is None else fn


dynamic = capture_control_flow = unified


@contextmanager
def flag_guard(flag_name: str, flag_value: Any) -> Iterator[None]:
    """A flag has this value inside the block."""
    before = flags.get_flags(flag_name)
    flags.set_flags({flag_name: flag_value})
    try:
        yield
    finally:
        flags.set_flags(before)


def fp16_guard() -> AbstractContextManager[None]:
    """Nothing: it marks ops for a static optimizer in pure float16, whose level covers the whole Program here.

    Models of PaddleClas compute inside it whatever their precision.
    """
    return nullcontext()


def convert_np_dtype_to_dtype_(dtype: Any) -> np.dtype:
    """The dtype that a name or NumPy type stands for."""
    return dtypes.as_dtype(dtype)


def _create_tensor(
    type: Any = None, name: str | None = None, shape: Any = None, dtype: Any = None, persistable: bool | None = None,
    **_: Any,
) -> Tensor:  # fmt: skip
    tensor = to_tensor(np.zeros(0, dtypes.as_dtype(dtype or "float32")))
    tensor.persistable = bool(persistable)
    if name is not None:
        tensor.name = name
    return tensor


def create_tensor(dtype: Any, name: str | None = None, persistable: bool = False) -> Tensor:
    """A Tensor without elements, to be filled by what writes into it."""
    return _create_tensor(name=name, dtype=dtype, persistable=persistable)


def tensor(
    data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, pin_memory: bool = False
) -> Tensor:
    """A new Tensor with a copy of data; paddle.tensor is a module that can be called."""
    return as_tensor(
        data.detach().clone() if isinstance(data, Tensor) else data, dtype, device, requires_grad, pin_memory
    )


def switch_main_program(program: Program) -> Program:
    """Record into this Program from now on; returns the one before."""
    before, defaults.main = defaults.main, program
    return before


def switch_startup_program(program: Program) -> Program:
    """Record initial values into this Program from now on; returns the one before."""
    before, defaults.startup = defaults.startup, program
    return before


def _manual_program_seed(seed: int) -> None:
    defaults.main.random_seed = seed
    defaults.startup.random_seed = seed


@contextmanager
def IrGuard() -> Iterator[None]:
    """Nothing: there is one kind of Program."""
    yield


OldIrGuard = DygraphPirGuard = DygraphOldIrGuard = IrGuard


class LayerHelper:
    """Makes the parameters of a function that is written as a layer; its ops are calls of functions."""

    def __init__(self, layer_type: str, **kwargs: Any) -> None:
        self.layer_type, self.kwargs = layer_type, kwargs
        self.name = kwargs.get("name") or layer_type
        self.main_program, self.startup_program = defaults.main, defaults.startup

    def create_parameter(
        self, attr: Any, shape: Any, dtype: Any = None, is_bias: bool = False, default_initializer: Any = None, **_: Any
    ) -> Any:
        """A Parameter of no Layer."""
        return Layer(dtype=dtype).create_parameter(shape, attr, dtype, is_bias, default_initializer)

    def get_default_dtype(self) -> np.dtype:
        """The dtype of parameters made without one."""
        return dtypes.default_dtype()

    def create_variable_for_type_inference(self, dtype: Any = None, stop_gradient: bool = False, **_: Any) -> Any:
        """Raises AbsentError: see append_op."""
        self.append_op()

    def append_op(self, *args: Any, type: str = "", **kwargs: Any) -> Any:
        """Raises AbsentError: a Program holds calls of functions here, not ops by type."""
        raise AbsentError(
            f"LayerHelper({self.layer_type!r}): a Program is made of calls of functions, not of ops by type; call the "
            "function, in static mode it is recorded"
        )

    append_activation = append_bias_op = append_op
