"""Calls, and sublayers of a model, whose inner results are not kept for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from polyreme.autograd.recompute import AS_IT_IS, Keep, recompute_forward, run_again
from polyreme.errors import ConfigError, did_you_mean
from polyreme.nn import Layer


def recompute(
    function: Callable[..., Any],
    *args: Any,
    preserve_rng_state: bool = True,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """function(*args, **kwargs), computed again in backward instead of keeping what it computed on the way.

    Outputs and gradients are those of the plain call, for Tensors among the arguments and for parameters that function
    reads. Random numbers and the autocast mode are always those of the first run and keyword arguments of any kind are
    passed on, so preserve_rng_state and use_reentrant choose between things that are the same here. Buffers that
    function writes are written once. If nothing wants a gradient, it is the plain call.

    Raises GradError in backward if function does something else when it runs again (a counter, NumPy's random numbers);
    ConfigError for a function that cannot be called. Source: arXiv:1604.06174.

    >>> from polyreme.eager.tensor import Tensor
    >>> x = Tensor(3.0, stop_gradient=False)
    >>> recompute(lambda v: v * v * v, x).backward()
    >>> x.grad.item()
    27.0
    """
    _check_callable("recompute", function)
    _check_flag("recompute", "preserve_rng_state", preserve_rng_state)
    _check_flag("recompute", "use_reentrant", use_reentrant)
    return run_again(function, args, kwargs)


def recompute_sequential(
    ctx: Mapping[str, Any], functions: Layer | Sequence[Callable[..., Any]], *args: Any, **kwargs: Any
) -> Any:
    """functions one after another, the first on args and kwargs, in ctx["segments"] equal runs that are recomputed.

    The last run, which backward needs first, is not recomputed; it takes what does not divide. ctx: segments (1),
    preserve_rng_state (True). Raises ConfigError for another key, and for more segments than functions.
    """
    _check_keys("recompute_sequential", ctx, ("segments", "preserve_rng_state"))
    segments = ctx.get("segments", 1)
    steps = list(functions.children()) if isinstance(functions, Layer) else list(functions)
    if not isinstance(segments, int) or isinstance(segments, bool) or not 1 <= segments <= len(steps):
        raise ConfigError(
            f"recompute_sequential: segments={segments!r} for {len(steps)} functions; give a whole number from 1 to "
            f"{len(steps)}"
        )
    size = len(steps) // segments
    for start in range(0, size * (segments - 1), size):
        run = _chain(steps[start : start + size])
        args, kwargs = (run_again(run, args, kwargs),), {}
    return _chain(steps[size * (segments - 1) :])(*args, **kwargs)


def recompute_hybrid(ctx: Mapping[str, Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """recompute under tensor parallelism. ctx: mp_group, offload (False), partition (False), preserve_rng_state (True).

    offload: the arguments that backward starts from are kept in host memory. partition: each device of the plan's `mp`
    axis keeps a part of them, of the last dim that the axis divides; they are gathered again in backward. Arguments
    without a history (the first block's, say) stay where the caller holds them.

    Raises ConfigError without mp_group, or for another key.
    """
    _check_keys("recompute_hybrid", ctx, ("mp_group", "offload", "partition", "preserve_rng_state"))
    _check_callable("recompute_hybrid", function)
    if ctx.get("mp_group") is None:
        raise ConfigError(
            "recompute_hybrid: ctx has no 'mp_group'; give the group of the tensor parallel axis, or call recompute"
        )
    keep = Keep(bool(ctx.get("offload", False)), "mp" if ctx.get("partition", False) else None)
    return run_again(function, args, kwargs, keep if keep.moves else AS_IT_IS)


def recompute_sublayers(model: Layer, names: Sequence[str], setting: str, *, offload: bool = False) -> None:
    """Have sublayers of a model, by their names, run again in backward; with offload, from inputs in host memory.

    Raises ConfigError, with the closest name, for one that is no sublayer; setting is what the caller was told them by.
    """
    layers = dict(model.named_sublayers())
    for name in names:
        if name not in layers:
            raise ConfigError(
                f"{setting} names {name!r}, which is no sublayer of {type(model).__name__}{did_you_mean(name, layers)}"
            )
    for name in names:
        layers[name].forward = recompute_forward(layers[name].forward, Keep(offload))


def follows_plan(model: Layer) -> bool:
    """Whether a model recomputes by itself what the plan in force says."""
    return any(hasattr(layer, "recompute") for layer in model.sublayers(include_self=True))


def _chain(steps: Iterable[Callable[..., Any]]) -> Callable[..., Any]:
    first, *rest = steps

    def run(*args: Any, **kwargs: Any) -> Any:
        value = first(*args, **kwargs)
        for step in rest:
            value = step(value)
        return value

    return run


def _check_callable(what: str, function: object) -> None:
    if not callable(function):
        raise ConfigError(f"{what}: the first argument is {function!r}; give a function or a Layer")


def _check_flag(what: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{what}: {name}={value!r}; give True or False")


def _check_keys(what: str, ctx: object, known: tuple[str, ...]) -> None:
    if not isinstance(ctx, Mapping):
        raise ConfigError(f"{what}: ctx is {ctx!r}; give a dict with any of {', '.join(known)}")
    for key in ctx:
        if key not in known:
            raise ConfigError(f"{what}: unknown key {key!r} in ctx{did_you_mean(key, known)}")
