"""Helpers and attributes of PaddlePaddle's layers that subclasses call and read."""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.eager.tensor import HookHandle
from polyreme.errors import ConfigError
from polyreme.nn import BatchNorm2D, Conv2D, LayerDict, Linear, ReLU, Sequential
from polyreme.nn import functional as F
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import ParamAttr
from polyreme.paddle_scripts.lookup import fetch
from polyreme.program.block import Block
from polyreme.program.current import default_main_program

# what an additive mask puts on a position left out
_MASKED = 1e9


def _convert_attention_mask(attn_mask: Any, dtype: Any) -> Any:
    """A mask as numbers to add to the scores: True and 1 keep a position. None stays None."""
    if attn_mask is None:
        return None
    if dtypes.is_floating(attn_mask.dtype):
        return attn_mask.astype(dtype)
    return (attn_mask.astype(dtype) - 1.0) * _MASKED


def _convert_param_attr_to_list(param_attr: Any, n: int) -> list[Any]:
    """n parameter attributes: those of a list, or one n times, whose name then has the number behind it."""
    if isinstance(param_attr, (list, tuple)):
        if len(param_attr) != n:
            raise ConfigError(f"{n} parameter attributes are needed, got {len(param_attr)}")
        return [ParamAttrNames._to_attr(attr) for attr in param_attr]
    attr = ParamAttr.of(param_attr)
    if attr is None:
        return [False] * n
    return [attr if attr.name is None else replace(attr, name=f"{attr.name}_{i}") for i in range(n)]


def _conv_nd(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, padding_algorithm: Any = None,
    dilation: Any = 1, groups: int = 1, data_format: str = "NCHW", *_: Any, **__: Any,
) -> Any:  # fmt: skip
    function = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.ndim]
    named = padding_algorithm in ("SAME", "VALID")
    return function(x, weight, bias, stride, padding_algorithm if named else padding, dilation, groups, data_format)


_CHECKPOINTS = "paddle_scripts.internals.checkpoints"
_set_state_dict = Layer.set_state_dict


class LayerNames:
    """Attributes of Layer."""

    _replaces = ("set_state_dict", "set_dict", "load_dict")
    _cast_to_low_precision = True

    def _build_once(self: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: a __call__ of a project's own asks for it before the first forward."""

    def set_state_dict(
        self: Any, state_dict: Mapping[str, Any], use_structured_name: bool = True
    ) -> tuple[list[str], list[str]]:
        """Layer's, but for values of another shape, which are left out and warned of: scripts load the weights of a
        model with another head so. Their names are among the missing ones and among the unexpected ones."""
        tensors = self.state_dict()
        known = tensors if use_structured_name else {t.name: t for t in tensors.values()}
        shapes = {
            name: (list(known[name].shape), list(value.shape))
            for name, value in state_dict.items()
            if name in known and hasattr(value, "shape") and tuple(value.shape) != tuple(known[name].shape)
        }
        if not shapes:
            return _set_state_dict(self, state_dict, use_structured_name)
        told = [f"{name} has shape {given}, not {own}" for name, (own, given) in shapes.items()]
        more = f" and {len(told) - 10} more" if len(told) > 10 else ""
        warnings.warn(
            f"{type(self).__name__}.set_state_dict: values of another shape are left out, and stay as they are here: "
            f"{'; '.join(told[:10])}{more}",
            stacklevel=2,
        )
        fitting = {name: value for name, value in state_dict.items() if name not in shapes}
        missing, unexpected = _set_state_dict(self, fitting, use_structured_name)
        return missing, [*unexpected, *shapes]

    set_dict = load_dict = set_state_dict

    @property
    def _helper(self: Any) -> Any:
        # fetched when it is asked for: its module loads more than a layer needs
        return fetch("paddle_scripts.internals.framework.LayerHelper")(self.full_name())

    def sharded_state_dict(self: Any, structured_name_prefix: str = "") -> dict[str, Any]:
        """Key -> ShardedWeight of everything in state_dict."""
        return fetch(f"{_CHECKPOINTS}.layer_state")(self, structured_name_prefix)

    def full(self: Any, aoa_config: Any = None, **groups: Any) -> Any:
        """(key, whole Tensor) of everything in state_dict, after the rules of aoa_config."""
        return fetch(f"{_CHECKPOINTS}.full_param")(self.sharded_state_dict(), aoa_config, **groups)

    def _to_impl(
        self: Any, device: Any = None, dtype: Any = None, blocking: bool | None = None, *_: Any, **__: Any
    ) -> Any:
        return self.to(device=device, dtype=dtype, blocking=blocking)

    def _obtain_parameters_buffers(
        self: Any, destination: Any = None, include_sublayers: bool = True, structured_name_prefix: str = ""
    ) -> dict[str, Any]:
        tensors = OrderedDict() if destination is None else destination
        for named in (self.named_parameters, self.named_buffers):
            for name, tensor in named(include_sublayers=include_sublayers):
                tensors[structured_name_prefix + name] = tensor
        return tensors


class ParameterNames:
    """Attributes of Parameter."""

    _home = "paddle.base.framework"

    @property
    def block(self: Any) -> Block:
        """Where a Program would have it: initializers called by hand are given this, and need nothing of it."""
        return default_main_program().global_block()


class ParamAttrNames:
    """Attributes of ParamAttr."""

    @staticmethod
    def _to_attr(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return [ParamAttrNames._to_attr(one) for one in arg]
        if hasattr(arg, "gradient"):  # a regularizer
            return ParamAttr(regularizer=arg)
        attr = ParamAttr.of(arg)
        return False if attr is None else attr


class IntermediateLayerGetter(LayerDict):
    """The layers of a model up to the last that is asked for; calling it gives their results by new names.

    model: its layers are called one after the other, in the order in which it has them. return_layers: name of a layer
    right below the model -> name of its result. Raises ConfigError for none, and for one that the model does not have.
    """

    def __init__(self, model: Layer, return_layers: Mapping[str, str]) -> None:
        children = dict(model.named_children())
        if not return_layers:
            raise ConfigError(
                f"IntermediateLayerGetter: return_layers is empty; give the name of a layer of {list(children)} and of "
                "its result"
            )
        unknown = [name for name in return_layers if name not in children]
        if unknown:
            raise ConfigError(f"IntermediateLayerGetter: the model has no layer {unknown}; it has {list(children)}")
        last = max(list(children).index(name) for name in return_layers)
        super().__init__(dict(list(children.items())[: last + 1]))
        self.return_layers = dict(return_layers)

    def forward(self, x: Any) -> OrderedDict[str, Any]:
        results: OrderedDict[str, Any] = OrderedDict()
        for name, layer in self.items():
            # as the model's own forward does before its last layer
            if isinstance(layer, Linear) and x.ndim == 4:
                x = x.flatten(1)
            x = layer(x)
            if name in self.return_layers:
                results[self.return_layers[name]] = x
        return results


class ConvNormActivation(Sequential):
    """A convolution with its normalization and activation, each left out where its layer is None.

    padding: (kernel_size - 1) / 2 * dilation unless given. bias: as a convolution without normalization has one.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any = 3, stride: Any = 1, padding: Any = None,
        groups: int = 1, norm_layer: Any = BatchNorm2D, activation_layer: Any = ReLU, dilation: int = 1,
        bias: bool | None = None,
    ) -> None:  # fmt: skip
        if padding is None:
            size = [kernel_size] if isinstance(kernel_size, int) else kernel_size
            padding = [(s - 1) // 2 * dilation for s in size]
            padding = padding[0] if isinstance(kernel_size, int) else padding
        if bias is None:
            bias = norm_layer is None
        super().__init__(
            Conv2D(
                in_channels, out_channels, kernel_size, stride, padding, dilation, groups,
                bias_attr=None if bias else False,
            ),
            *(() if norm_layer is None else (norm_layer(out_channels),)),
            *(() if activation_layer is None else (activation_layer(),)),
        )  # fmt: skip


class NumberedHook(HookHandle):
    """Handle of a hook that a Layer of the script's own keeps under `_hook_id` in a dict, hooks."""

    _numbers = itertools.count()

    def __init__(self, hooks: dict[int, Any]) -> None:
        self._hook_id = next(self._numbers)
        super().__init__(lambda: hooks.pop(self._hook_id, None) is not None)
