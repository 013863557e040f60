"""Layer: parameters, buffers and sublayers under names, and a forward.

A layer names the logical dims of its parameters; it knows no device.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self, overload

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state, unique_name
from polyreme.core.annotations import DTypeLike
from polyreme.core.devices import place as places
from polyreme.core.devices.abstract import Abstract
from polyreme.core.part_table import PartTable
from polyreme.core.spelling import takes_second_names
from polyreme.core.state import TensorState
from polyreme.core.symbol import Symbol
from polyreme.eager.tensor import Tensor, destination, to_tensor
from polyreme.errors import CheckpointError, ConfigError, ProgramError, ShapeError
from polyreme.keyword_names import NamesKeywords
from polyreme.nn.hooks import LayerHooks, run_after, run_after_error, run_before
from polyreme.nn.initializer import Constant, XavierUniform, chosen_initializer
from polyreme.nn.parameter import ParamAttr, ParamAttrLike, Parameter, make_parameter
from polyreme.nn.parameter_entry import wholes
from polyreme.nn.second_names import SecondNames

_log = logging.getLogger("polyreme.nn")
_watch, _attributes = state.watch, state.attributes


_MADE_BY_INIT = frozenset({"_forward_pre_hooks", "_forward_post_hooks", "_parameters", "_buffers", "_sub_layers"})


class LoadedKeys(NamedTuple):
    """Names that load_state_dict did not find in the state, and those that the layer does not have."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Layer(NamesKeywords, LayerHooks, SecondNames):
    """Base class of everything with parameters: assign parameters and sublayers as attributes, buffers by
    register_buffer, and write forward. A Tensor that is a plain attribute is a buffer that is not saved.

    >>> class Half(Layer):
    ...     def forward(self, x):
    ...         return x * 0.5
    >>> Half()(to_tensor([2.0])).tolist()
    [1.0]
    """

    _is_recurrent: ClassVar[bool] = False
    """Whether forward calls sublayers once a step of a sequence; a summary then has one line for all of them."""

    def __init__(self, name_scope: str | None = None, dtype: Any = None) -> None:
        self.__dict__["_parameters"] = PartTable()
        self.__dict__["_buffers"] = PartTable()
        self.__dict__["_non_persistable_buffer_names_set"] = set()
        self.__dict__["_sub_layers"] = PartTable()
        self._make_hooks()
        self.__dict__["_made"] = {}
        self.training = True
        scope = name_scope or _words(type(self).__name__)
        self._full_name = unique_name.generate(scope)
        self._dtype = dtypes.as_dtype(dtype) if dtype is not None else dtypes.default_dtype()

    # calling

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the layer computes; subclasses write it."""
        raise NotImplementedError(f"{type(self).__name__} has no forward(); write one")

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        capture = _watch.active
        forward = self.forward if capture is None else capture.entered(self)
        try:
            if self._forward_pre_hooks:
                inputs, kwargs = run_before(self, inputs, kwargs)
            if self._forward_post_hooks_always_called:
                forward = _always_followed(self, forward)
            outputs = forward(*inputs, **kwargs)
            return run_after(self, inputs, kwargs, outputs) if self._forward_post_hooks else outputs
        finally:
            if capture is not None:
                capture.left()

    # attributes

    def __setattr__(self, name: str, value: Any) -> None:
        tables = self.__dict__
        if "_parameters" not in tables:
            if isinstance(value, (Parameter, Layer)):
                raise RuntimeError(
                    f"call super().__init__() before assigning {name!r} in {type(self).__name__}.__init__"
                )
            object.__setattr__(self, name, value)
            return
        parameters, buffers, layers = tables["_parameters"], tables["_buffers"], tables["_sub_layers"]
        if isinstance(value, Parameter):
            _forget(name, tables, buffers, layers)
            parameters[name] = value
        elif isinstance(value, Layer):
            _forget(name, tables, parameters, buffers)
            layers[name] = value
        elif name in parameters:
            if value is not None:
                raise TypeError(
                    f"{name!r} is a parameter of {type(self).__name__}; assign a Parameter or None, "
                    f"not {type(value).__name__}; .{name}.set_value(...) gives it other values"
                )
            parameters[name] = None
        elif name in buffers:
            if value is not None and not isinstance(value, TensorState):
                raise TypeError(
                    f"{name!r} is a buffer of {type(self).__name__}; assign a Tensor or None, "
                    f"not {type(value).__name__}"
                )
            if (watcher := state.code_watcher()) is not None:
                watcher.replaces(buffers, name)
            buffers[name] = value
        elif name in layers and value is None:
            layers[name] = None
        else:
            layers.pop(name, None)
            object.__setattr__(self, name, value)
            _attributes.version += 1

    def __getattr__(self, name: str) -> Any:
        if "_parameters" not in self.__dict__ and name in _MADE_BY_INIT:
            raise RuntimeError(f"call super().__init__() first of all in {type(self).__name__}.__init__")
        for table in ("_parameters", "_buffers", "_sub_layers"):
            found = self.__dict__.get(table, {})
            if name in found:
                return found[name]
        # with these two, Python says the nearest name when it shows the error
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)

    def __delattr__(self, name: str) -> None:
        for table in (self._parameters, self._buffers, self._sub_layers):
            if name in table:
                del table[name]
                self._non_persistable_buffer_names_set.discard(name)
                return
        object.__delattr__(self, name)
        _attributes.version += 1

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._parameters, *self._buffers, *self._sub_layers]

    # making and registering

    @overload
    def create_parameter(
        self,
        shape: Sequence[int],
        attr: Literal[False],
        dtype: DTypeLike | None = None,
        is_bias: bool = False,
        default_initializer: Callable[..., Any] | None = None,
        dims: Sequence[str | None] | None = None,
    ) -> None: ...
    @overload
    def create_parameter(
        self,
        shape: Sequence[int],
        attr: ParamAttrLike = None,
        dtype: DTypeLike | None = None,
        is_bias: bool = False,
        default_initializer: Callable[..., Any] | None = None,
        dims: Sequence[str | None] | None = None,
    ) -> Parameter: ...
    def create_parameter(
        self,
        shape: Sequence[int],
        attr: Any = None,
        dtype: Any = None,
        is_bias: bool = False,
        default_initializer: Any = None,
        dims: Sequence[str | None] | None = None,
    ) -> Any:
        """A new Parameter (None if attr is False): Xavier-uniform values by default, zeros for a bias.

        dims: logical dims, one name per dim, for placement over a mesh.
        """
        wanted = ParamAttr.of(attr)
        if wanted is None:
            return None
        chosen = chosen_initializer(is_bias) or default_initializer or (Constant(0.0) if is_bias else XavierUniform())
        if wanted.name is None:
            wanted = wanted.changed(name=self._next_name("b" if is_bias else "w"))
        return make_parameter(shape, dtype if dtype is not None else self._dtype, wanted, chosen, dims)

    def _next_name(self, kind: str) -> str:
        """The name of the layer's next parameter: "w", or "b" for a bias."""
        count = self._made[kind] = self._made.get(kind, -1) + 1
        return f"{self._full_name}.{kind}_{count}"

    def create_tensor(self, name: str | None = None, persistable: bool | None = None, dtype: Any = None) -> Tensor:
        """An empty Tensor to be filled by the layer."""
        made = to_tensor(np.zeros(0), dtype or self._dtype)
        made.persistable = bool(persistable)
        return made

    create_variable = create_tensor

    def add_parameter(self, name: str, parameter: Any) -> Any:
        """Register a Parameter (or None) under a name; returns it."""
        if parameter is not None and not isinstance(parameter, Parameter):
            raise TypeError(f"add_parameter({name!r}) needs a Parameter, got {type(parameter).__name__}")
        _check_name(self, name, self._parameters)
        self._parameters[name] = parameter
        return parameter

    def add_sublayer(self, name: str, sublayer: Any) -> Any:
        """Register a Layer under a name; returns it."""
        if sublayer is not None and not isinstance(sublayer, Layer):
            raise TypeError(f"{type(self).__name__}: sublayer {name!r} needs a Layer, got {_shown(sublayer)}")
        self._sub_layers[str(name)] = sublayer
        return sublayer

    def register_buffer(self, name: str, tensor: Any, persistable: bool = True) -> None:
        """Register a Tensor that is state but not trained; it is saved unless persistable is False."""
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"register_buffer({name!r}) needs a Tensor, got {type(tensor).__name__}")
        _check_name(self, name, self._buffers)
        if tensor is not None and (recorder := state.recorder()) is not None:
            tensor = recorder.declare_buffer(f"{self._full_name}.{name}", tensor)
        self._buffers[name] = tensor
        if tensor is not None:
            tensor.persistable = persistable
        unsaved = self._non_persistable_buffer_names_set
        (unsaved.discard if persistable else unsaved.add)(name)

    # walking

    def full_name(self) -> str:
        """The layer's unique name, such as "linear_0"."""
        return self._full_name

    def children(self) -> Iterator[Layer]:
        """Direct sublayers."""
        return (layer for _, layer in self.named_children())

    def named_children(self) -> Iterator[tuple[str, Layer]]:
        """(name, layer) of the direct sublayers, each layer once."""
        seen: set[int] = set()
        for name, layer in self._sub_layers.items():
            if layer is not None and id(layer) not in seen:
                seen.add(id(layer))
                yield name, layer

    def named_sublayers(
        self,
        prefix: str = "",
        include_self: bool = False,
        layers_set: set[Any] | None = None,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, Layer]]:
        """(dotted name, layer) of all sublayers, depth first, each layer once (unless remove_duplicate is False)."""
        seen = layers_set if layers_set is not None else set()
        if remove_duplicate:
            if self in seen:
                return
            seen.add(self)
        if include_self:
            yield prefix, self
        for name, layer in self._sub_layers.items():
            if layer is not None:
                inner = f"{prefix}.{name}" if prefix else name
                yield from layer.named_sublayers(
                    inner, include_self=True, layers_set=seen, remove_duplicate=remove_duplicate
                )

    def sublayers(self, include_self: bool = False) -> list[Layer]:
        """All sublayers, depth first."""
        return [layer for _, layer in self.named_sublayers(include_self=include_self)]

    @takes_second_names
    def named_parameters(
        self, prefix: str = "", include_sublayers: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """(dotted name, parameter), each parameter once.

        Where several Layers have entries of one parameter (those of a MoELayer's experts), it is that one, if all of
        them are here, named as its entries with * for what differs.
        """
        yield from wholes(self._named("_parameters", prefix, include_sublayers, remove_duplicate))

    @takes_second_names
    def parameters(self, include_sublayers: bool = True) -> list[Parameter]:
        """All parameters, each once."""
        return [p for _, p in self.named_parameters(include_sublayers=include_sublayers)]

    @takes_second_names
    def named_buffers(
        self, prefix: str = "", include_sublayers: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """(dotted name, buffer), each buffer once: registered Tensors, then those that are plain attributes."""
        yield from self._named("_buffers", prefix, include_sublayers, remove_duplicate)

    @takes_second_names
    def buffers(self, include_sublayers: bool = True) -> list[Tensor]:
        """All buffers, each once."""
        return [b for _, b in self.named_buffers(include_sublayers=include_sublayers)]

    def _named(self, table: str, prefix: str, deep: bool, once: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        layers = (
            self.named_sublayers(prefix, include_self=True, remove_duplicate=once) if deep else iter([(prefix, self)])
        )
        for where, layer in layers:
            entries = layer.__dict__[table]
            for name, tensor in {**entries, **_tensors_of(layer)}.items() if table == "_buffers" else entries.items():
                if tensor is None or (once and id(tensor) in seen):
                    continue
                seen.add(id(tensor))
                yield (f"{where}.{name}" if where else name), tensor

    def apply(self, fn: Callable[[Layer], None]) -> Self:
        """Call fn on every sublayer, then on this layer."""
        for layer in self.children():
            layer.apply(fn)
        fn(self)
        return self

    # modes

    def train(self, mode: bool = True) -> Self:
        """Training behaviour from now on (dropout drops, batch statistics are used); eval() if mode is False."""
        for layer in self.sublayers(include_self=True):
            layer.training = mode
        return self

    def eval(self) -> Self:
        """Inference behaviour from now on."""
        for layer in self.sublayers(include_self=True):
            layer.training = False
        return self

    def clear_gradients(self, set_to_zero: bool = True) -> None:
        """Set every parameter's gradient to zeros, or forget it."""
        for p in self.parameters():
            p.clear_gradient(set_to_zero)

    def to(
        self, device: Any = None, dtype: Any = None, blocking: bool | None = None, non_blocking: bool = False
    ) -> Self:
        """Move parameters and buffers to a device and floating ones to a dtype, in place: to("gpu:0"), to("bfloat16").

        Raises ProgramError in static mode, where they have no values. No move blocks, whatever the last two say.
        """
        _check_has_values(self)
        device, dtype = destination([device], None, dtype)
        for tensor in [*self.parameters(), *self.buffers()]:
            wanted = dtype if dtype is not None and dtypes.is_floating(tensor.dtype) else None
            array = state.read(tensor.detach().to(device=device, dtype=wanted))
            state.write(tensor, array)
        if dtype is not None and dtypes.is_floating(dtypes.as_dtype(dtype)):
            for layer in self.sublayers(include_self=True):
                layer._dtype = dtypes.as_dtype(dtype)
        return self

    def astype(self, dtype: Any = None) -> Self:
        """Cast floating parameters and buffers, in place."""
        return self.to(dtype=dtype)

    def float(self, excluded_layers: Any = None) -> Self:
        """float32 parameters and buffers, except in layers of the excluded classes."""
        return self._cast_to("float32", excluded_layers)

    def bfloat16(self, excluded_layers: Any = None) -> Self:
        """bfloat16 parameters and buffers, except in layers of the excluded classes."""
        return self._cast_to("bfloat16", excluded_layers)

    def float16(self, excluded_layers: Any = None) -> Self:
        """float16 parameters and buffers, except in layers of the excluded classes."""
        return self._cast_to("float16", excluded_layers)

    def cpu(self) -> Self:
        """Move to the host's processor."""
        return self.to(places.CPUPlace())

    def cuda(self, device: int | places.Place | None = None) -> Self:
        """Move to a GPU, the first one if none is named; DeviceError if there is none."""
        return self.to(device if isinstance(device, places.Place) else places.CUDAPlace(device or 0))

    def _cast_to(self, dtype: str, excluded: Any) -> Self:
        _check_has_values(self)
        classes = tuple(excluded) if isinstance(excluded, (list, tuple)) else (excluded,) if excluded else ()
        for layer in self.sublayers(include_self=True):
            if isinstance(layer, classes):
                continue
            layer._dtype = dtypes.as_dtype(dtype)
            parameters = (p.whole for p in layer.parameters(include_sublayers=False))
            for tensor in [*parameters, *layer.buffers(include_sublayers=False)]:
                if dtypes.is_floating(tensor.dtype):
                    state.write(tensor, state.read(tensor).astype(dtype))
        return self

    # state

    def state_dict(
        self,
        destination: dict[Any, Any] | None = None,
        include_sublayers: bool = True,
        structured_name_prefix: str = "",
        use_hook: bool = True,
        keep_vars: bool = True,
    ) -> dict[str, Tensor]:
        """Name -> parameter or persistable buffer: the Tensors themselves, or detached ones with keep_vars=False.

        use_hook: call the hooks of register_state_dict_hook, a layer's after those of the layers inside it.
        """
        result: dict[str, Tensor] = OrderedDict() if destination is None else destination
        for name, tensor in [*self._parameters.items(), *self._buffers.items()]:
            if tensor is not None and name not in self._non_persistable_buffer_names_set:
                result[structured_name_prefix + name] = tensor if keep_vars else tensor.detach()
        for name, layer in self._sub_layers.items() if include_sublayers else ():
            if layer is not None:
                Layer.state_dict(layer, result, True, f"{structured_name_prefix}{name}.", use_hook, keep_vars)
        for hook in self._state_dict_hooks.values() if use_hook else ():
            changed = hook(result)
            result = result if changed is None else changed
        return result

    def set_state_dict(
        self, state_dict: Mapping[str, Any], use_structured_name: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load values by name; returns (names this layer has that were not given, names given that it has not).

        Names of the layer that are not given are logged: their values stay. Values keep this layer's dtypes. Raises
        ShapeError, loading nothing, if some shape does not fit, and ConfigError if no name does.
        """
        mine = self.state_dict()
        if not use_structured_name:
            mine = {t.name: t for t in mine.values()}
        if not isinstance(state_dict, Mapping):
            raise ConfigError(
                f"set_state_dict takes a dict of names and Tensors, got {type(state_dict).__name__}; "
                "paddle.load(path) reads one from a file, layer.state_dict() gives a layer's"
            )
        if state_dict and mine and not any(k in mine for k in state_dict):
            raise ConfigError(
                f"set_state_dict: {type(self).__name__} has none of the names given "
                f"({', '.join(list(state_dict)[:5])}, ...); it has {', '.join(list(mine)[:5])}, ..."
            )
        shapes = {k: tuple(v.shape if hasattr(v, "shape") else np.shape(v)) for k, v in state_dict.items() if k in mine}
        wrong = {k: (mine[k].shape, shape) for k, shape in shapes.items() if shape != tuple(mine[k].shape)}
        if wrong:
            listed = [f"{k}: expected {list(have)}, got {list(got)}" for k, (have, got) in wrong.items()]
            more = f" and {len(listed) - 10} more" if len(listed) > 10 else ""
            raise ShapeError(
                f"set_state_dict: shapes do not fit, nothing was loaded: {'; '.join(listed[:10])}{more}"
                f"{_transposed(wrong.values())}"
            )
        for name, value in state_dict.items():
            if name in mine:
                mine[name].set_value(value)
        missing, unexpected = [k for k in mine if k not in state_dict], [k for k in state_dict if k not in mine]
        if missing and state_dict:
            spare = f"; it has {_some(unexpected)}, which the layer has not" if unexpected else ""
            _log.warning(
                "set_state_dict: %s keeps its own values of %s, which the dict does not have%s; load_state_dict "
                "refuses that", type(self).__name__, _some(missing), spare,
            )  # fmt: skip
        return missing, unexpected

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> LoadedKeys:
        """set_state_dict that, if strict, raises CheckpointError, loading nothing, unless the names are the same.

        Returns (missing_keys, unexpected_keys). Raises ConfigError for assign=True: Tensors are given new values.
        """
        if assign:
            raise ConfigError("load_state_dict: assign=True is not available; the parameters stay the same Tensors")
        mine = self.state_dict()
        keys = LoadedKeys([k for k in mine if k not in state_dict], [k for k in state_dict if k not in mine])
        if strict and (keys.missing_keys or keys.unexpected_keys):
            raise CheckpointError(
                f"load_state_dict of {type(self).__name__}: missing {keys.missing_keys[:10]}, unexpected "
                f"{keys.unexpected_keys[:10]}; give strict=False to load the others"
            )
        if len(keys.missing_keys) < len(mine):
            self.set_state_dict(state_dict)
        return keys

    set_dict = set_state_dict
    load_dict = set_state_dict

    def to_static_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """state_dict with the buffers that are not persistable too."""
        found = self.state_dict(*args, **kwargs)
        found.update(self.named_buffers())
        return found

    def extra_repr(self) -> str:
        """What repr shows between the parentheses; subclasses write it."""
        return ""

    def __repr__(self) -> str:
        inner = [f"({name}): {layer!r}".replace("\n", "\n  ") for name, layer in self._sub_layers.items()]
        head = self.extra_repr()
        if not inner:
            return f"{type(self).__name__}({head})"
        body = "\n  ".join(inner)
        return f"{type(self).__name__}({head}\n  {body}\n)"


def _words(class_name: str) -> str:
    """A class's name in lower case, with "_" before each word: "BatchNorm2D" -> "batch_norm2d"."""
    return re.sub(r"(?<=[^_])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])", "_", class_name).lower()


def _always_followed(layer: Layer, forward: Callable) -> Callable:
    """forward, after which the hooks that are always called run if it raises."""

    def followed(*inputs: Any, **kwargs: Any) -> Any:
        try:
            return forward(*inputs, **kwargs)
        except Exception:
            run_after_error(layer, inputs, kwargs)
            raise

    return followed


def _check_has_values(layer: Layer) -> None:
    if state.recording():
        raise ProgramError(
            f"{type(layer).__name__}: in static mode parameters have no values to move or cast; build the layer with "
            "the dtype wanted (set_default_dtype, or dtype=), and choose the device by Executor(place)"
        )


def _tensors_of(layer: Layer) -> dict[str, Tensor]:
    """Tensors with a value that are attributes of a layer without being registered."""
    values = {name: value for name, value in layer.__dict__.items() if isinstance(value, Tensor)}
    return {name: t for name, t in values.items() if not isinstance(t._array, (state.Tracer, Symbol, Abstract))}


def _forget(name: str, *tables: dict[Any, Any]) -> None:
    for table in tables:
        table.pop(name, None)


def _shown(value: Any) -> str:
    """What stands where a Layer is needed, and what to write instead."""
    if isinstance(value, type) and issubclass(value, Layer):
        return f"the class {value.__name__}; write {value.__name__}()"
    if callable(value) and hasattr(value, "__name__"):
        name = value.__name__
        return f"the function {name}; give the Layer that does the same, as nn.ReLU() does relu, or call it in forward"
    return type(value).__name__


def _some(names: Sequence[str]) -> str:
    """The first five of some names, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(str, names[:5])) + more


def _transposed(wrong: Iterable[tuple[Any, Any]]) -> str:
    """The end of a message about shapes that do not fit, if they are those of matrices the other way round."""
    is_so = all(len(have) == 2 and tuple(have) == tuple(got)[::-1] for have, got in wrong)
    return "; PyTorch stores a Linear's weight as [out, in], here it is [in, out]: transpose those" if is_so else ""


def _check_name(layer: Layer, name: str, table: Mapping) -> None:
    if not isinstance(name, str) or not name or "." in name:
        raise KeyError(f"{name!r} cannot name a parameter or buffer: a non-empty string without dots is needed")
    if hasattr(layer, name) and name not in table:
        raise KeyError(f"{type(layer).__name__} already has an attribute {name!r}; choose another name")
