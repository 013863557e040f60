"""register_op: a function of the user's on jax arrays becomes an op like those of the tables.

It may be plain jax, a Pallas kernel or an FFI call; see docs/custom_ops.md.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import mode
from polyreme.core.amp_policy import AmpClass
from polyreme.core.op import OPS, TENSOR, TENSORS, Op
from polyreme.core.partition import partitioned
from polyreme.core.sharding_rule import OpCall
from polyreme.errors import ConfigError, GradError, ShapeError, did_you_mean
from polyreme.kernels import select

_PLATFORMS = {"cpu": ("cpu",), "gpu": ("cuda", "rocm"), "cuda": ("cuda",), "rocm": ("rocm",), "tpu": ("tpu",)}
Backward = Callable[..., Any] | Literal["traced"] | None


class CustomOp(Op):
    """An op made of a user's function; see register_op.

    kernels: platform as jax names it -> the function there. rule: dims such as "*b [n] -> *b [n]" by which it is split
    over a mesh. Raises ConfigError for a rule that does not fit the parameters.
    """

    positional: int

    uncast: frozenset[Any]
    opaque: None
    names: tuple[str, ...]
    index: dict[str, int]
    defaults: tuple[Any, ...]
    inputs: tuple[str, ...]

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        backward: Backward,
        kernels: Mapping[str, Callable[..., Any]],
        amp: AmpClass,
        saves: bool,
        rule: str | None,
    ) -> None:
        parameters = _parameters(name, function)
        self.fn = self._run
        self.name = name
        self.amp: AmpClass = amp
        self.saves = saves
        self.method = self.inplace = self.real = self.constant = False
        self.uncast = self.in_pieces = frozenset()
        self.kernels = {}
        self.calls = {}
        self.opaque = None
        self.integers = "fit"
        self.names = tuple(p.name for p in parameters)
        self.positional = len(self.names)
        self.index = {n: i for i, n in enumerate(self.names)}
        self.defaults = tuple(p.default for p in parameters)
        self.annotations = {p.name: _annotation(p) for p in parameters}
        self.function = function
        self.backward = backward
        self.platforms = kernels
        self.inputs = tuple(n for n, k in zip(self.names, self.kinds, strict=True) if k in (TENSOR, TENSORS))
        if not self.inputs:
            raise ConfigError(
                f"register_op: {name!r} has no tensor parameter; one is annotated jax.Array or list[jax.Array], or has "
                "neither annotation nor default"
            )
        self.rule = self.read_rule(rule, f"register_op: {name!r}")

    # computing

    def _run(self, *filled: Any) -> Any:
        """The result on arrays, with the op's own gradient."""
        arguments = dict(zip(self.names, filled, strict=True))
        tensors = {n: arguments[n] for n in self.inputs if arguments[n] is not None}

        def plain(tensors: dict[str, Any]) -> Any:
            return self._check_results(self.function(*{**arguments, **tensors}.values()), "")

        # a program that must run on any device takes the function alone
        bare = (self.rule is None and not self.platforms) or select.backend() == "other"
        forward = plain if bare else functools.partial(self._placed, arguments, plain)
        if self.backward == "traced" and bare:
            return plain(tensors)
        return self._with_gradient(arguments, tensors, plain, forward)

    def _placed(self, arguments: dict[str, Any], plain: Callable, tensors: dict[str, Any]) -> Any:
        """The result from the kernel for the platform, on each device's own pieces if there is a rule."""

        def pick(*arrays: Any) -> Any:
            now = dict(zip(tensors, arrays, strict=True))
            if not self.platforms:
                return plain(now)
            want = _outline(jax.eval_shape(plain, now))
            branches = {p: self._kernel(p, fn, arguments, want) for p, fn in self.platforms.items()}
            return jax.lax.platform_dependent(now, default=plain, **branches)

        arrays = list(tensors.values())
        if self.rule is None:
            return pick(*arrays)
        results = jax.eval_shape(pick, *arrays)
        many = type(results) if isinstance(results, (tuple, list)) else None
        attrs = {n: v for n, v in arguments.items() if n not in self.inputs}
        rule = self.rule(OpCall.of(self.name, tuple(tensors), arrays, attrs, [results] if many is None else results))
        return pick(*arrays) if rule is None else partitioned(pick, arrays, rule, many)

    def _kernel(self, platform: str, fn: Callable, given: dict[str, Any], want: str) -> Callable:
        def kernel(tensors: dict[str, Any]) -> Any:
            outs = self._check_results(fn(*{**given, **tensors}.values()), f" on {platform}")
            if _outline(outs) != want:
                raise ShapeError(
                    f"{self.name}: its kernel for {platform} gives {_outline(outs)}, the op gives "
                    f"{want}; every kernel gives what the registered function gives"
                )
            return outs

        return kernel

    def _check_results(self, outs: Any, where: str) -> Any:
        """outs as an array or a tuple or list of arrays; ConfigError for anything else."""
        every = list(outs) if isinstance(outs, (tuple, list)) else [outs]
        wrong = next((o for o in every if not isinstance(o, (jax.Array, np.ndarray))), None)
        if not every or wrong is not None:
            got = "nothing" if not every else type(wrong).__name__
            raise ConfigError(
                f"{self.name}: the registered function{where} gave {got}; an op gives an array, or a tuple or list of "
                "arrays"
            )
        arrays = [jnp.asarray(o) for o in every]
        return arrays[0] if not isinstance(outs, (tuple, list)) else (list if isinstance(outs, list) else tuple)(arrays)

    # the gradient

    def _with_gradient(
        self, arguments: dict[str, Any], tensors: dict[str, Any], plain: Callable, forward: Callable
    ) -> Any:
        call = jax.custom_vjp(forward)

        def saved(tensors: dict[str, Any]) -> tuple[Any, tuple]:
            outs = call(tensors)  # itself, not forward: it has a gradient when this is differentiated again
            return outs, (tensors, outs)

        def pull(kept: tuple, cotangents: Any) -> tuple:
            tensors, outs = kept
            if self.backward is None:
                raise GradError(
                    f"{self.name} has no gradient: it was registered with backward=None; detach() what it is given, or "
                    "register it with a backward function"
                )
            if self.backward == "traced":
                return jax.vjp(plain, tensors)[1](cotangents)
            return (self._user_gradients(self.backward, {**arguments, **tensors}, tensors, outs, cotangents),)

        call.defvjp(saved, pull)
        return call(tensors)

    def _user_gradients(
        self, backward: Any, arguments: dict[str, Any], tensors: dict[str, Any], outs: Any, cotangents: Any
    ) -> dict:
        """The gradients that the user's backward gives, by input; None where it gives none."""
        many = isinstance(outs, (tuple, list))
        every = list(outs) if many else [outs]
        # jax's cotangents are dL/dx - i dL/dy, gradients here dL/dx + i dL/dy
        grads = [
            _conjugate(c) if dtypes.is_inexact(o.dtype) else None
            for o, c in zip(every, list(cotangents) if many else [cotangents], strict=True)
        ]
        attributes = {n: v for n, v in arguments.items() if n not in self.inputs}
        positional = [*(arguments[n] for n in self.inputs), *every, *grads]
        try:
            inspect.signature(backward).bind(*positional, **attributes)
        except TypeError as error:
            raise GradError(
                f"{self.name}: backward{inspect.signature(backward)} is called with the inputs "
                f"({', '.join(self.inputs)}), {len(every)} results, as many gradients of results"
                f"{''.join(f', {n}=' for n in attributes)}: {error}"
            ) from None
        gradients = backward(*positional, **attributes)
        several = len(self.inputs) > 1 or TENSORS not in self.kinds
        gradients = tuple(gradients) if isinstance(gradients, (tuple, list)) and several else (gradients,)
        if len(gradients) != len(self.inputs):
            raise GradError(
                f"{self.name}: backward gave {len(gradients)} gradients for {len(self.inputs)} inputs "
                f"({', '.join(self.inputs)}); give one each, None for an input that has none"
            )
        by_name = dict(zip(self.inputs, gradients, strict=True))
        return {n: self._gradient(n, t, by_name[n]) for n, t in tensors.items()}

    def _gradient(self, name: str, tensor: Any, gradient: Any) -> Any:
        if isinstance(tensor, list):
            if gradient is None:
                return None
            if not isinstance(gradient, (list, tuple)) or len(gradient) != len(tensor):
                raise GradError(f"{self.name}: backward gave no list of {len(tensor)} gradients for the list {name!r}")
            return [self._gradient(f"{name}[{i}]", t, g) for i, (t, g) in enumerate(zip(tensor, gradient, strict=True))]
        if gradient is None or not dtypes.is_inexact(tensor.dtype):
            return None
        dtype, shape = getattr(gradient, "dtype", None), getattr(gradient, "shape", None)
        turned = dtype is not None and dtypes.is_complex(dtype) and not dtypes.is_complex(tensor.dtype)
        if shape != tensor.shape or turned:
            got = type(gradient).__name__ if shape is None else f"{dtype}{list(shape)}"
            raise GradError(
                f"{self.name}: backward gave {got} as the gradient of {name!r}, which is "
                f"{tensor.dtype}{list(tensor.shape)}; a gradient has its input's shape, and is None where there is none"
            )
        return _conjugate(jnp.asarray(gradient, tensor.dtype))


def _conjugate(x: Any) -> Any:
    return jnp.conj(x) if dtypes.is_complex(x.dtype) else x


def _outline(outs: Any) -> str:
    """Dtypes and shapes of results, as messages show them and as they are compared."""
    return ", ".join(f"{o.dtype.name}{list(o.shape)}" for o in jax.tree.leaves(outs))


def _parameters(name: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    if not callable(function):
        raise ConfigError(f"register_op takes a function, got {type(function).__name__}")
    try:
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    except NameError as error:
        raise ConfigError(
            f"register_op: an annotation of {name!r} cannot be read ({error}); import what it names at the top of the "
            "file"
        ) from error
    starred = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if starred:
        raise ConfigError(f"register_op: {name!r} has keyword-only or starred parameters {starred}; give plain ones")
    return parameters


def _annotation(parameter: inspect.Parameter) -> Any:
    """A parameter with neither annotation nor default is a tensor."""
    if parameter.annotation is not parameter.empty:
        return parameter.annotation
    return jax.Array if parameter.default is parameter.empty else None


def register_op(
    fn: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    backward: Backward = "traced",
    kernels: Mapping[str, Callable[..., Any]] | None = None,
    amp: AmpClass = "widest",
    sharding: str | None = None,
    saves: bool = False,
) -> Any:
    """Make an op of a function on jax arrays; returns the public function, which takes Tensors. Also a decorator.

    fn: parameters without annotation and default, or annotated as arrays, are tensors; the others are attributes, plain
    Python values. It gives an array, or a tuple or list of arrays; shapes and dtypes follow from running it.

    name: the op's, fn.__name__ by default; a static Program stores it.
    backward: "traced", the derivative of fn; None, and asking for a gradient raises GradError; or a function
    (inputs..., results..., gradients of the results..., the attributes by name) -> a gradient for each input, None for
    one that has none. Complex gradients are dL/dx + i dL/dy, as everywhere.
    kernels: platform ("cpu", "gpu", "cuda", "rocm", "tpu") -> a function like fn that runs there in its place.
    amp: "low" runs in half precision under autocast, "fp32" never does, "widest" follows its inputs.
    sharding: how it is split over a mesh, where XLA cannot see: "*b [n], [n] -> *b [n]" computes each piece of the
    dims b where it lies, on all of n. Without it XLA decides, and gathers what goes into a foreign call.
    saves: keep the results for backward rather than compute them again; for ops that are dear to run.

    Raises ConfigError for a name that is taken and a function that is no op.

    >>> def squares(x, y, scale=1.0):
    ...     return scale * (x * x + y * y)
    >>> sum_of_squares = register_op(squares, name="sum_of_squares")
    >>> sum_of_squares(paddle.to_tensor([3.0]), paddle.to_tensor([4.0]), scale=2.0).tolist()
    [50.0]
    """
    if fn is None:
        return functools.partial(
            register_op, name=name, backward=backward, kernels=kernels, amp=amp, sharding=sharding, saves=saves
        )
    name = str(name or getattr(fn, "__name__", ""))
    what = f"register_op: {name!r}"
    if not name.isidentifier():
        raise ConfigError(f"{what} is no name for an op; give name=, an identifier")
    if name in OPS:
        raise ConfigError(f"{what} is taken by the op of {OPS[name].__module__}; give another name=")
    if amp not in ("low", "fp32", "widest"):
        raise ConfigError(f"{what}: amp={amp!r}; choose 'low', 'fp32' or 'widest'")
    if backward is not None and backward != "traced" and not callable(backward):
        raise ConfigError(f"{what}: backward={backward!r}; give a function, 'traced' or None")
    new = CustomOp(name, fn, backward, _by_platform(kernels or {}, what), amp, saves, sharding)
    current = mode.current

    def public(*args: Any, **kwargs: Any) -> Any:
        return current.mode.run(new, args, kwargs)

    if not isinstance(fn, functools.partial):
        functools.update_wrapper(public, fn)
    public.__name__ = public.__qualname__ = name
    public.op = new  # type: ignore[attr-defined]
    OPS[name] = public
    return public


def _by_platform(kernels: Mapping[str, Callable[..., Any]], what: str) -> dict[str, Callable[..., Any]]:
    by_platform: dict[str, Callable[..., Any]] = {}
    for platform, kernel in kernels.items():
        if platform not in _PLATFORMS:
            raise ConfigError(f"{what}: kernels has {platform!r}, no platform{did_you_mean(platform, _PLATFORMS)}")
        if not callable(kernel):
            raise ConfigError(f"{what}: its kernel for {platform!r} is {type(kernel).__name__}, no function")
        by_platform |= dict.fromkeys(_PLATFORMS[platform], kernel)
    return by_platform
