"""BuildStrategy and ExecutionStrategy: the settings of a CompiledProgram, each with what it does here.

A setting is HONOURED, HARMLESS (the result is the same either way, for the reason noted) or REFUSED (any
value but the default is an error, which says what to do instead).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar

from polyreme.distributed.settings import HARMLESS, HONOURED, REFUSED, Field
from polyreme.errors import ConfigError, did_you_mean


class ReduceStrategy(enum.IntEnum):
    """How gradients are combined: on every device, or on one that then sends the parameter to all."""

    AllReduce = 0
    Reduce = 1
    _NoReduce = 2


class GradientScaleStrategy(enum.IntEnum):
    """What the loss's gradient starts from: 1 / number of devices, 1, or what is fed as `<loss>@GRAD`."""

    CoeffNumDevice = 0
    One = 1
    Customized = 2


_XLA = "names a fusion or a memory reuse; XLA does its own, with the same values"
_SCHEDULE = "orders work that has one result; XLA schedules it"
_COLLECTIVES = "tunes how gradients are sent; XLA chooses, with the same values"
_JOB = "several processes train with fleet or paddle.distributed, not with a CompiledProgram"
_THREADS = "XLA runs the program on threads of its own"


def _harmless(default: Any, note: str) -> Field:
    return Field(default, HARMLESS, note)


def _no(default: Any, note: str) -> Field:
    return Field(default, REFUSED, note)


BUILD: Mapping[str, Field] = {
    "reduce_strategy": _harmless(ReduceStrategy.AllReduce, _COLLECTIVES),
    "gradient_scale_strategy": Field(
        GradientScaleStrategy.CoeffNumDevice, HONOURED, "gradients of parameters are averaged, or added up"
    ),
    "debug_graphviz_path": _no("", "print the Program with to_string() instead"),
    "enable_sequential_execution": _harmless(False, _SCHEDULE),
    "remove_unnecessary_lock": _harmless(True, _THREADS),
    "num_trainers": _no(1, _JOB),
    "trainers_endpoints": _no([], _JOB),
    "trainer_id": _no(0, _JOB),
    "nccl_comm_num": _harmless(1, _COLLECTIVES),
    "use_hierarchical_allreduce": _harmless(False, _COLLECTIVES),
    "hierarchical_allreduce_inter_nranks": _harmless(0, _COLLECTIVES),
    "hierarchical_allreduce_exter_nranks": _harmless(0, _COLLECTIVES),
    "fuse_elewise_add_act_ops": _harmless(False, _XLA),
    "fuse_bn_act_ops": _harmless(False, _XLA),
    "fuse_bn_add_act_ops": _harmless(True, _XLA),
    "enable_auto_fusion": _harmless(False, _XLA),
    "fuse_relu_depthwise_conv": _harmless(False, _XLA),
    "fuse_broadcast_ops": _harmless(False, _COLLECTIVES),
    "fuse_all_optimizer_ops": _harmless(False, _XLA),
    "sync_batch_norm": Field(
        False, HONOURED, "batch norms use the statistics of the whole batch, not of each device's part"
    ),
    "memory_optimize": _harmless(None, _XLA),
    "is_distribution": _no(False, _JOB),
    "async_mode": _no(False, "there is no parameter server; updates are synchronous"),
    "enable_inplace": _harmless(True, _XLA),
    "fuse_all_reduce_ops": _harmless(True, _COLLECTIVES),
    "enable_backward_optimizer_op_deps": _harmless(True, _SCHEDULE),
    "cache_runtime_context": _harmless(False, _XLA),
    "mkldnn_enabled_op_types": _harmless(set(), _XLA),
    "fuse_gemm_epilogue": _harmless(False, _XLA),
    "fused_attention": _harmless(False, _XLA),
    "fused_feedforward": _harmless(False, _XLA),
    "fuse_adamw": _harmless(False, _XLA),
    "fuse_resunit": _harmless(False, _XLA),
    "fuse_dot_product_attention": _harmless(False, _XLA),
    "sequential_run": _harmless(False, _SCHEDULE),
    "enable_addto": _harmless(False, _XLA),
    "allow_cuda_graph_capture": _harmless(False, _XLA),
    "build_cinn_pass": _harmless(False, _XLA),
}

EXECUTION: Mapping[str, Field] = {
    "num_threads": _harmless(0, _THREADS),
    "use_cuda": _no(False, "devices are those of places, or of the Executor's place"),
    "allow_op_delay": _harmless(False, _SCHEDULE),
    "num_iteration_per_drop_scope": _harmless(100, "temporaries are freed after their last use"),
    "num_iteration_per_run": Field(1, HONOURED, "runs on the same feeds; the last one's fetches are returned"),
    "use_thread_barrier": _harmless(False, _THREADS),
    "use_experimental_executor": _harmless(False, _THREADS),
}


class _Settings:
    """Values for a table of fields, checked as they are set."""

    fields: ClassVar[Mapping[str, Field]]
    _values: dict[str, Any]
    _is_used: bool

    def __init__(self) -> None:
        object.__setattr__(self, "_values", {})
        object.__setattr__(self, "_is_used", False)

    def __getattr__(self, name: str) -> Any:
        if name not in self.fields:
            raise AttributeError(f"{type(self).__name__} has no setting {name!r}{did_you_mean(name, self.fields)}")
        return self._values.get(name, self.fields[name].default)

    def __setattr__(self, name: str, value: Any) -> None:
        owner = type(self).__name__
        if name not in self.fields:
            raise ConfigError(f"{owner} has no setting {name!r}{did_you_mean(name, self.fields)}")
        if self._is_used:
            raise ConfigError(f"{owner}.{name}={value!r}: a CompiledProgram was made with it already; make a new one")
        field = self.fields[name]
        if not _fits(value, field.default):
            raise ConfigError(f"{owner}.{name} is like {field.default!r}, got {value!r} of type {type(value).__name__}")
        if field.kind == REFUSED and value != field.default:
            raise ConfigError(f"{owner}.{name}={value!r} cannot be honoured: {field.note}")
        self._values[name] = value

    def given(self) -> dict[str, Any]:
        """The settings that were set, enumerators as integers."""
        return {name: int(v) if isinstance(v, enum.IntEnum) else v for name, v in self._values.items()}

    def use(self) -> None:
        """Allow no more changes."""
        object.__setattr__(self, "_is_used", True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in self._values.items())})"


def _fits(value: Any, default: Any) -> bool:
    if default is None or isinstance(default, bool):
        return isinstance(value, bool) or value is default
    if isinstance(default, enum.IntEnum):
        return isinstance(value, type(default))
    if isinstance(default, int):
        return type(value) is int
    return isinstance(value, (list, set, tuple)) if isinstance(default, (list, set)) else isinstance(value, str)


class BuildStrategy(_Settings):
    """How a CompiledProgram is made. Raises ConfigError for an unknown name, a wrong type, and what is refused.

    >>> strategy = BuildStrategy()
    >>> strategy.gradient_scale_strategy = BuildStrategy.GradientScaleStrategy.One
    """

    fields: ClassVar[Mapping[str, Field]] = BUILD
    ReduceStrategy = ReduceStrategy
    GradientScaleStrategy = GradientScaleStrategy


class ExecutionStrategy(_Settings):
    """How a CompiledProgram is run. Raises ConfigError as BuildStrategy does."""

    fields: ClassVar[Mapping[str, Field]] = EXECUTION


__all__ = ["BUILD", "EXECUTION", "BuildStrategy", "ExecutionStrategy", "GradientScaleStrategy", "ReduceStrategy"]
