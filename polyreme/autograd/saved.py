"""saved_tensors_hooks: what the tape keeps for backward goes through two functions of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from polyreme.eager import tape
from polyreme.errors import ConfigError


class saved_tensors_hooks:
    """Inside the block every Tensor saved for backward becomes pack_hook(tensor); backward uses unpack_hook of that.

    To keep activations elsewhere (host memory, disk) or in a narrower dtype. Ops that would keep intermediate results
    of their own compute them again from the inputs instead.

    >>> from polyreme.eager.tensor import Tensor
    >>> x = Tensor(3.0, stop_gradient=False)
    >>> with saved_tensors_hooks(lambda t: t.numpy(), lambda a: Tensor(a)):
    ...     y = x * x
    >>> y.backward()
    >>> x.grad.item()
    6.0
    """

    def __init__(self, pack_hook: Callable[[Any], Any], unpack_hook: Callable[[Any], Any]) -> None:
        for name, hook in (("pack_hook", pack_hook), ("unpack_hook", unpack_hook)):
            if not callable(hook):
                raise ConfigError(f"saved_tensors_hooks: {name} is a function, got {hook!r}")
        self._pair = (pack_hook, unpack_hook)
        self._outer: list[Any] = []

    def __enter__(self) -> Self:
        self._outer.append(tape.saved_hooks.pair)
        tape.saved_hooks.pair = self._pair
        return self

    def __exit__(self, *_: object) -> None:
        tape.saved_hooks.pair = self._outer.pop()
