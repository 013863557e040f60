"""Functions that a Layer calls before and after its forward, and on its state dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.core.part_table import PartTable
from polyreme.eager.tensor import HookHandle
from polyreme.errors import ConfigError


class LayerHooks:
    """Mixed into Layer: hooks by key, in the order they run, and which of them want more than the inputs."""

    def _make_hooks(self) -> None:
        tables = self.__dict__
        tables["_forward_pre_hooks"], tables["_forward_post_hooks"] = PartTable(), PartTable()
        tables["_forward_pre_hooks_with_kwargs_flag"] = PartTable()
        tables["_forward_post_hooks_with_kwargs_flag"] = PartTable()
        tables["_forward_post_hooks_always_called"] = PartTable()
        tables["_state_dict_hooks"] = PartTable()

    def register_forward_pre_hook(
        self: Any, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
    ) -> HookHandle:
        """Call hook(layer, inputs) before forward; what it returns, if anything, replaces the inputs.

        prepend: before the hooks there are. with_kwargs: hook(layer, inputs, keywords), which returns None or both.
        """
        flags = [self._forward_pre_hooks_with_kwargs_flag] if with_kwargs else []
        return _register(self._forward_pre_hooks, hook, prepend, flags)

    def register_forward_post_hook(
        self: Any,
        hook: Callable[..., Any],
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> HookHandle:
        """Call hook(layer, inputs, outputs) after forward; what it returns, if anything, replaces the outputs.

        prepend: before the hooks there are. with_kwargs: hook(layer, inputs, keywords, outputs). always_call: after a
        forward that raises too, with None for the outputs.
        """
        flags = [self._forward_post_hooks_with_kwargs_flag] if with_kwargs else []
        flags += [self._forward_post_hooks_always_called] if always_call else []
        return _register(self._forward_post_hooks, hook, prepend, flags)

    register_forward_hook = register_forward_post_hook

    def register_state_dict_hook(self: Any, hook: Callable[[dict[Any, Any]], dict[Any, Any] | None]) -> HookHandle:
        """Call hook(state) when state_dict has this layer's names, to change them.

        What the hook of the layer that state_dict is called on returns, if anything, is the state.
        """
        return _register(self._state_dict_hooks, hook, False, [])


def _register(hooks: PartTable, hook: Callable, prepend: bool, flags: list[PartTable]) -> HookHandle:
    key = object()
    hooks[key] = hook
    if prepend:
        hooks.move_to_end(key, last=False)
    for flag in flags:
        flag[key] = True

    def remove() -> bool:
        for flag in flags:
            flag.pop(key, None)
        return hooks.pop(key, None) is not None

    return HookHandle(remove)


def run_before(layer: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs and keywords as the hooks before forward leave them."""
    with_kwargs = layer._forward_pre_hooks_with_kwargs_flag
    for key, hook in layer._forward_pre_hooks.items():
        if key in with_kwargs:
            changed = hook(layer, inputs, keywords)
            if changed is not None:
                if not isinstance(changed, tuple) or len(changed) != 2:
                    raise ConfigError(
                        f"{type(layer).__name__}: a hook with_kwargs returns None or (inputs, keywords), got "
                        f"{type(changed).__name__}"
                    )
                inputs, keywords = changed
        elif (changed := hook(layer, inputs)) is not None:
            inputs = changed if isinstance(changed, tuple) else (changed,)
    return inputs, keywords


def run_after(layer: Any, inputs: tuple[Any, ...], keywords: dict[str, Any], outputs: Any) -> Any:
    """Outputs as the hooks after forward leave them."""
    with_kwargs = layer._forward_post_hooks_with_kwargs_flag
    for key, hook in layer._forward_post_hooks.items():
        given = (inputs, keywords, outputs) if key in with_kwargs else (inputs, outputs)
        changed = hook(layer, *given)
        if changed is not None:
            outputs = changed
    return outputs


def run_after_error(layer: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Runs the hooks that are called after a forward that raised."""
    with_kwargs = layer._forward_post_hooks_with_kwargs_flag
    for key in layer._forward_post_hooks_always_called:
        given = (inputs, keywords, None) if key in with_kwargs else (inputs, None)
        layer._forward_post_hooks[key](layer, *given)
