"""Constructors that, given an argument they do not have, say the nearest one that they have."""

import inspect
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from polyreme.errors import nearest

# what other libraries call it -> ((the parameter here, or "" for whatever there is, what to write), ...)
_ELSEWHERE: dict[str, tuple[tuple[str, str], ...]] = {
    "affine": (("weight_attr", "write weight_attr=False, bias_attr=False for none"),),
    "batch_first": (
        ("time_major", "write time_major=, its opposite"),
        ("", "leave it out: inputs are [batch, length, features]"),
    ),
    "betas": (("beta1", "write beta1=, beta2="),),
    "bias": (("bias_attr", "write bias_attr=False for none"),),
    "bidirectional": (("direction", "write direction='bidirectional'"),),
    "device": (("", "leave it out: set_device says where new Tensors go"),),
    "eps": (("epsilon", "write epsilon="),),
    "gamma": (("factor", "write factor="),),
    "inplace": (("", "leave it out: a captured step writes no value twice"),),
    "lr": (("learning_rate", "write learning_rate="),),
    "momentum": (("learning_rate", "optimizer.Momentum has it"),),
    "nesterov": (("use_nesterov", "write use_nesterov="),),
    "norm_first": (("normalize_before", "write normalize_before="),),
    "optimizer": (("learning_rate", "give the rate itself, and the schedule to the optimizer as its learning_rate="),),
    "padding_mode": (("padding", "pad first, with nn.Pad2D and its like"),),
    "params": (("parameters", "write parameters="),),
    "pin_memory": (("batch_sampler", "leave it out: transfers pin memory themselves"),),
    "sampler": (("batch_sampler", "write batch_sampler=io.BatchSampler(sampler=..., batch_size=...)"),),
}


class NamesKeywords:
    """Mixed into public classes whose constructors many call by keywords, those that users derive from them too."""

    if not TYPE_CHECKING:  # type checkers read what __init__ takes

        def __new__(cls, *args: Any, **kwargs: Any) -> Self:
            if kwargs:
                check_keywords(cls.__name__, cls.__init__, kwargs)
            if args or kwargs:  # copies are made without any
                _check_required(cls.__name__, cls.__init__, len(args), kwargs)
            following = super().__new__
            return following(cls) if following is object.__new__ else following(cls, *args, **kwargs)


def check_keywords(what: str, function: Callable[..., Any], keywords: Collection[str]) -> None:
    """Raise TypeError for the first keyword that function does not have, with what to write in its place.

    >>> check_keywords("Linear", lambda in_features, bias_attr=None: None, ["bias"])
    Traceback (most recent call last):
        ...
    TypeError: Linear() has no parameter 'bias'; write bias_attr=False for none. It has in_features, bias_attr
    """
    names = _keywords(function)
    if names is None:
        return
    for keyword in keywords:
        if keyword not in names:
            raise TypeError(
                f"{what}() has no parameter {keyword!r}{_instead(keyword, names)}. It has {', '.join(names) or 'none'}"
            )


def _check_required(what: str, function: Callable[..., Any], given: int, keywords: Collection[str]) -> None:
    """Raise TypeError where a parameter without a default is given neither by position nor by keyword.

    Python would name the class that wrote the constructor, which may be a base that nobody sees.
    """
    missing = [name for name in _required(function)[given:] if name not in keywords]
    if missing:
        names = ", ".join(_keywords(function) or missing)
        raise TypeError(f"{what}() needs {' and '.join(map(repr, missing))}. It has {names}")


@lru_cache(4096)
def _required(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional parameters of a constructor that have no default."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ()
    positional = (p for p in parameters[1:] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    return tuple(p.name for p in positional if p.default is p.empty)


def _instead(keyword: str, names: tuple[str, ...]) -> str:
    for parameter, words in _ELSEWHERE.get(keyword, ()):
        if not parameter or parameter in names:
            return f"; {words}"
    return nearest(keyword, names).rstrip("?")


@lru_cache(4096)
def _keywords(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names that a function may be called with, None for any and where it looks itself."""
    if getattr(function, "checks_keywords", False):
        return None
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # it has no signature that Python could read
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return tuple(p.name for p in parameters if p.kind not in positional and p.name != "self")
