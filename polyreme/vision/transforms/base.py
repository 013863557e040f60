"""BaseTransform and Compose: what a transform is applied to, and several in a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from polyreme.errors import ConfigError

_KEYS = ("image", "coords", "boxes", "mask")


class BaseTransform:
    """Base of transforms: a subclass defines _apply_image(image), and _get_params(inputs) if it draws random numbers.

    keys: what the inputs are, ("image",) by default; of a tuple of inputs, those named "image" are transformed, others
    need a _apply_NAME, or pass unchanged if there are more inputs than keys.
    """

    keys: tuple[str, ...] | tuple[str, ...]

    def __init__(self, keys: Sequence[str] | None = None) -> None:
        self.keys = ("image",) if keys is None else tuple(keys)
        for key in self.keys:
            if key not in _KEYS:
                raise ConfigError(f"{type(self).__name__}: keys has {key!r}; the choices are {', '.join(_KEYS)}")
        self.params: Any = None

    def __call__(self, inputs: Any) -> Any:
        """The transformed image, or the tuple of inputs with the named ones transformed."""
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        self.params = self._get_params(given)
        done = [self._apply(key, value) for key, value in zip(self.keys, given, strict=False)]
        found = (*done, *given[len(done) :])
        return found if isinstance(inputs, tuple) else found[0]

    def _get_params(self, inputs: tuple) -> Any:
        """What one call draws, the same for all of its inputs; kept in self.params."""
        return None

    def _apply(self, key: str, value: Any) -> Any:
        apply = getattr(self, f"_apply_{key}", None)
        if apply is None:
            raise ConfigError(
                f"{type(self).__name__}: keys has {key!r}, but there is no _apply_{key}; define it, or drop the key"
            )
        return apply(value)


class Compose:
    """Transforms, each applied to what the one before it gave.

    >>> Compose([lambda x: x + 1, lambda x: x * 2])(3)
    8
    """

    transforms: list[Any]

    def __init__(self, transforms: Sequence[Any]) -> None:
        if not isinstance(transforms, Iterable):
            raise ConfigError(f"Compose: transforms is one {type(transforms).__name__}; give a list of them")
        self.transforms = list(transforms)
        for transform in self.transforms:
            if not callable(transform):
                raise ConfigError(f"Compose: transforms holds a {type(transform).__name__}; give callables")

    def __call__(self, data: Any) -> Any:
        """data after all of them."""
        for transform in self.transforms:
            data = transform(data)
        return data

    def __repr__(self) -> str:
        return f"Compose({self.transforms!r})"
