"""The second spellings of Layer's methods in the public API, and looking parts up by dotted names."""

from __future__ import annotations

from typing import Any

from polyreme.errors import ConfigError


class SecondNames:
    """Mixed into Layer; everything here is another name for, or a short way to, a method of Layer."""

    def modules(self: Any) -> Any:
        """This layer and all its sublayers, depth first."""
        return iter(self.sublayers(include_self=True))

    def named_modules(self: Any, memo: set[Any] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """(dotted name, layer) of this layer and all its sublayers."""
        return self.named_sublayers(prefix, include_self=True, layers_set=memo, remove_duplicate=remove_duplicate)

    def add_module(self: Any, name: str, module: Any) -> None:
        """Register a Layer under a name."""
        self.add_sublayer(name, module)

    register_module = add_module

    def register_parameter(self: Any, name: str, param: Any) -> None:
        """Register a Parameter (or None) under a name."""
        self.add_parameter(name, param)

    def get_submodule(self: Any, target: str) -> Any:
        """The sublayer of a dotted name, this layer for ""; raises AttributeError if there is none."""
        layer = self
        for name in target.split(".") if target else ():
            table = layer._sub_layers
            if table.get(name) is None:
                raise AttributeError(
                    f"{self.__class__.__name__} has no sublayer {target!r}: {layer.__class__.__name__} has "
                    f"{', '.join(table) or 'none'}"
                )
            layer = table[name]
        return layer

    get_sublayer = get_submodule

    def set_submodule(self: Any, target: str, layer: Any, strict: bool = False) -> None:
        """Put a Layer in the place of the sublayer of a dotted name, which strict says must be there.

        Raises AttributeError for a name on the way, or under strict the last, that is not there, ConfigError for "".
        """
        where, _, name = target.rpartition(".")
        if not name:
            raise ConfigError(f"set_sublayer({target!r}): give the name of a sublayer")
        owner = self.get_submodule(where)
        if strict:
            owner.get_submodule(name)
        owner.add_sublayer(name, layer)

    set_sublayer = set_submodule

    @property
    def _modules(self: Any) -> Any:
        return self._sub_layers

    def get_parameter(self, target: str) -> Any:
        """The parameter of a dotted name; raises AttributeError if there is none."""
        return self._part("_parameters", "parameter", target)

    def get_buffer(self, target: str) -> Any:
        """The buffer of a dotted name; raises AttributeError if there is none."""
        return self._part("_buffers", "buffer", target)

    def _part(self, table: str, what: str, target: str) -> Any:
        where, _, name = target.rpartition(".")
        owner = self.get_submodule(where)
        parts = getattr(owner, table)
        if parts.get(name) is None:
            raise AttributeError(
                f"{owner.__class__.__name__} has no {what} {name!r}; it has {', '.join(parts) or 'none'}"
            )
        return parts[name]

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Forget every parameter's gradient, or set it to zeros."""
        self.clear_gradients(set_to_zero=not set_to_none)

    def requires_grad_(self: Any, requires_grad: bool = True) -> Any:
        """Train every parameter from now on, or none."""
        for p in self.parameters():
            p.trainable = requires_grad
        return self

    def half(self: Any) -> Any:
        """float16 parameters and buffers."""
        return self.to(dtype="float16")

    def double(self: Any) -> Any:
        """float64 parameters and buffers."""
        return self.to(dtype="float64")

    def type(self: Any, dst_type: Any) -> Any:
        """Cast floating parameters and buffers, in place."""
        return self.to(dtype=dst_type)
