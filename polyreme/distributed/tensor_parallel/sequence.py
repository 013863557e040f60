"""Megatron's sequence parallelism: activations [seq, batch, ...] split along seq over `mp` between parallel layers.

Source: arXiv:2205.05198, section 4.2.2.  Tensors are global, so none of these changes a value: they say
where the seq dim lies before and after, for the value and, the other way round, for its gradient. XLA puts an
all-gather where a whole is needed, and a reduce-scatter (on CPU: an all-reduce and a slice) where a sum over `mp` is
wanted split. Everything here is the identity without a plan and under one whose `mp` is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyreme.core import layout as layouts
from polyreme.distributed.checkpoint import build_sharded_state_dict
from polyreme.distributed.tensor_parallel.constraints import constrain_dim, move_sequence
from polyreme.distributed.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from polyreme.distributed.tensor_parallel.random_streams import get_rng_state_tracker
from polyreme.errors import ConfigError
from polyreme.nn import functional as F
from polyreme.nn.layer import Layer


def scatter(input: Any) -> Any:
    """input split along dim 0; its gradient is gathered."""
    return move_sequence(input, "scatter", before=False, after=True)


def all_gather(input: Any) -> Any:
    """input gathered along dim 0; its gradient is summed over `mp` and split."""
    return move_sequence(input, "all_gather", before=True, after=False)


def reduce_scatter(input: Any) -> Any:
    """input, a sum over `mp` that is still to be made, summed and split along dim 0; its gradient is gathered.

    A global Tensor is never a partial sum that a user sees: on one that is computed already this is scatter.
    """
    return move_sequence(input, "reduce_scatter", before=False, after=True)


class ScatterOp:
    """scatter, as apply(input)."""

    apply = staticmethod(scatter)


class GatherOp:
    """apply(input) gathers along dim 0; its gradient, which is whole too, is split and not summed again."""

    @staticmethod
    def apply(input: Any) -> Any:
        """input gathered along dim 0; its gradient is split."""
        return move_sequence(input, "GatherOp", before=True, after=False)


class AllGatherOp:
    """all_gather, as apply(input)."""

    apply = staticmethod(all_gather)


class ReduceScatterOp:
    """reduce_scatter, as apply(input)."""

    apply = staticmethod(reduce_scatter)


class ColumnSequenceParallelLinear(ColumnParallelLinear):
    """ColumnParallelLinear of x [seq, batch, in] split along seq: all-gather, then product -> [seq, batch, out].

    The result is split along its last dim: gather_output must be False, else ConfigError.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Any = None,
        has_bias: bool | None = None,
        gather_output: bool = True,
        fuse_matmul_bias: bool = False,
        mp_group: Any = None,
        name: str | None = None,
    ) -> None:
        if gather_output:
            raise ConfigError(
                "ColumnSequenceParallelLinear: gather_output=True; its output stays split along the last dim for the "
                "row-parallel layer that follows, give gather_output=False"
            )
        super().__init__(in_features, out_features, weight_attr, has_bias, False, fuse_matmul_bias, mp_group, name)

    def forward(self, input: Any) -> Any:
        return constrain_dim(_biased(_product(all_gather(input), self.weight), self.bias), -1, "inner")


class RowSequenceParallelLinear(RowParallelLinear):
    """RowParallelLinear whose result is split along seq: product, reduce-scatter, then the bias -> [seq, batch, out].

    x [seq, batch, in] is split along its last dim: input_is_parallel must be True, else ConfigError.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Any = None,
        has_bias: bool = True,
        input_is_parallel: bool = False,
        fuse_matmul_bias: bool = False,
        mp_group: Any = None,
        name: str | None = None,
    ) -> None:
        if not input_is_parallel:
            raise ConfigError(
                "RowSequenceParallelLinear: input_is_parallel=False; its input is the split output of a "
                "column-parallel layer, give input_is_parallel=True"
            )
        super().__init__(in_features, out_features, weight_attr, has_bias, True, fuse_matmul_bias, mp_group, name)
        if self.bias is not None:
            mark_as_sequence_parallel_parameter(self.bias)

    def forward(self, input: Any) -> Any:
        summed = reduce_scatter(_product(constrain_dim(input, -1, "inner"), self.weight))
        return _biased(summed, self.bias)


def _product(x: Any, weight: Any) -> Any:
    # batch first under a plan: linear may flatten the leading dims, and only the outermost of them can stay split
    if len(x.shape) != 3 or layouts.active.layout is None:
        return F.linear(x, weight)
    return F.linear(x.transpose([1, 0, 2]), weight).transpose([1, 0, 2])


def _biased(x: Any, bias: Any) -> Any:
    # in x's dtype: under autocast the product is low, and so is linear's result
    return x if bias is None else x + bias.astype(x.dtype)


def mark_as_sequence_parallel_parameter(parameter: Any) -> None:
    """Note on a parameter that it is used where activations are split along seq. See is_sequence_parallel_parameter."""
    parameter.sequence_parallel = True


def is_sequence_parallel_parameter(parameter: Any) -> bool:
    """True if mark_as_sequence_parallel_parameter was called on it."""
    return bool(getattr(parameter, "sequence_parallel", False))


def register_sequence_parallel_allreduce_hooks(
    model: Layer, accumulation_steps: int, fuse_sequence_parallel_allreduce: bool
) -> None:
    """Does nothing: the gradient of a global Tensor is summed over the devices that computed parts of it.

    Kept, like the three functions below, so that scripts written for rank-local gradients run unchanged. Raises
    ConfigError for a model that is no Layer.
    """
    if not isinstance(model, Layer):
        raise ConfigError(f"register_sequence_parallel_allreduce_hooks takes a Layer, got {type(model).__name__}")


def create_fused_allreduce_gradient_hook(
    parameter_list: Sequence[Any], accumulation_steps: int
) -> Callable[[Any], None]:
    """A gradient hook that leaves the gradient as it is: it is summed already."""
    return _as_it_is


def create_non_fused_allreduce_gradient_hook(param: Any, accumulation_steps: int) -> Callable[[Any], None]:
    """A gradient hook that leaves the gradient as it is: it is summed already."""
    return _as_it_is


def fused_allreduce_gradients_with_group(
    parameter_list: Sequence[Any], group: Any, bucket_size: int = 128 * 1024 * 1024, scale: float | None = None
) -> None:
    """Does nothing: gradients are summed over every axis already, and XLA joins small all-reduces by itself.

    Raises ConfigError for a scale, which would have to divide them: divide the loss instead.
    """
    if scale not in (None, 1):
        raise ConfigError(
            f"fused_allreduce_gradients_with_group: scale={scale!r}; gradients of global Tensors are those of the loss "
            "as computed, divide the loss instead"
        )


def _as_it_is(gradient: Any) -> None:
    return None


def is_fused_matmul_bias_supported() -> bool:
    """False: there is no separate fused product; the one Linear is fused."""
    return False


def is_fused_linear_param_grad_add_supported() -> bool:
    """False: there is no separate fused accumulation; XLA fuses the addition of gradients."""
    return False


__all__ = [
    "AllGatherOp",
    "ColumnSequenceParallelLinear",
    "GatherOp",
    "ReduceScatterOp",
    "RowSequenceParallelLinear",
    "ScatterOp",
    "all_gather",
    "build_sharded_state_dict",
    "create_fused_allreduce_gradient_hook",
    "create_non_fused_allreduce_gradient_hook",
    "fused_allreduce_gradients_with_group",
    "get_rng_state_tracker",
    "is_fused_linear_param_grad_add_supported",
    "is_fused_matmul_bias_supported",
    "is_sequence_parallel_parameter",
    "mark_as_sequence_parallel_parameter",
    "reduce_scatter",
    "register_sequence_parallel_allreduce_hooks",
    "scatter",
]
