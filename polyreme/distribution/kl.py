"""kl_divergence between two distributions, by functions registered for pairs of classes.

The functions stand beside the families they are of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
_REGISTERED: dict[tuple[type, type], Callable[..., Any]] = {}


def kl_divergence(p: Any, q: Any) -> Tensor:
    """Kullback-Leibler divergence of q from p, the mean under p of log(p / q), nats: [*batch_shape].

    The function is the one registered for the classes nearest to p's and q's. Raises NotImplementedError if there is
    none.

    >>> from polyreme.distribution import Normal
    >>> kl_divergence(Normal(0.0, 1.0), Normal(1.0, 1.0)).item()
    0.5
    """
    return _find(type(p), type(q))(p, q)


def register_kl(cls_p: type, cls_q: type) -> Callable[[F], F]:
    """Decorator: the function (p, q) -> Tensor that computes kl_divergence for a pair of classes and their subclasses.

    >>> from polyreme.distribution import Distribution
    >>> class Here(Distribution):
    ...     pass
    >>> @register_kl(Here, Here)
    ... def between(p, q):
    ...     return 0.0
    >>> kl_divergence(Here(), Here())
    0.0
    """
    for given in (cls_p, cls_q):
        if not isinstance(given, type):
            raise ConfigError(f"register_kl takes two subclasses of Distribution, got {given!r}")

    def register(fn: F) -> F:
        _REGISTERED[cls_p, cls_q] = fn
        return fn

    return register


def _find(cls_p: type, cls_q: type) -> Callable[..., Any]:
    """Of the pairs registered for these classes or classes above, the nearest in both.

    Raises ConfigError where one pair is nearer in p and another in q: neither can be preferred.
    """
    fits = [
        (cls_p.__mro__.index(a), cls_q.__mro__.index(b))
        for a, b in _REGISTERED
        if _above(a, cls_p) and _above(b, cls_q)
    ]
    if not fits:
        raise NotImplementedError(
            f"kl_divergence({cls_p.__name__}, {cls_q.__name__}): no function is registered for these classes; write "
            "one with register_kl, or estimate it from samples of p: (p.log_prob(x) - q.log_prob(x)).mean()"
        )
    by_p, by_q = min(fits), min(fits, key=lambda at: at[::-1])
    if by_p != by_q:
        first, second = ((cls_p.__mro__[a].__name__, cls_q.__mro__[b].__name__) for a, b in (by_p, by_q))
        raise ConfigError(
            f"kl_divergence({cls_p.__name__}, {cls_q.__name__}): the functions registered for {first} and {second} fit "
            f"equally well; register one for ({cls_p.__name__}, {cls_q.__name__})"
        )
    return _REGISTERED[cls_p.__mro__[by_p[0]], cls_q.__mro__[by_p[1]]]


def _above(cls: type, below: type) -> bool:
    return cls in below.__mro__
