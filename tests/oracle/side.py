"""One side of the differential run: makes each call of a file in one framework and writes down what came of it.

Run as a script by an interpreter that has the framework, `python side.py FRAMEWORK CALLS RESULTS FIRST END`;
it imports nothing of polyreme but polyreme itself. A line of CALLS is a call, a line of RESULTS its outcome; calls
FIRST to END are made, so that a run can go on after a call that ended the process, and no process compiles too much.
"""

import base64
import importlib
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Sparse(NamedTuple):
    """A dense array that each side makes sparse: layout "coo" or "csr"."""

    array: np.ndarray
    layout: str


class View(NamedTuple):
    """An array that each side makes as a view of a larger Tensor, or in a dtype that NumPy has not: how, of VIEWS."""

    array: np.ndarray
    how: str


class Made(NamedTuple):
    """An object that each side makes: the path of a class, and its arguments."""

    path: str
    args: tuple


def encoded(value: Any) -> Any:
    """A value as JSON: arrays by their bytes, tuples and dtypes marked."""
    if isinstance(value, Made):
        return {"made": [value.path, encoded(value.args)]}
    if isinstance(value, View):
        return {"view": [encoded(value.array), value.how]}
    if isinstance(value, Sparse):
        return {"sparse": [encoded(value.array), value.layout]}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, np.ndarray):
        # tobytes is C order whatever the strides
        return {"array": base64.b64encode(value.tobytes()).decode(), "of": value.dtype.name, "shape": value.shape}
    if isinstance(value, (np.generic, complex)):
        number = value.item() if isinstance(value, np.generic) else value
        return {"complex": [number.real, number.imag]} if isinstance(number, complex) else number
    if isinstance(value, tuple):
        return {"tuple": [encoded(v) for v in value]}
    if isinstance(value, list):
        return [encoded(v) for v in value]
    if isinstance(value, dict):
        return {"dict": {k: encoded(v) for k, v in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop, value.step]}
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def decoded(value: Any) -> Any:
    """The value that encoded() made JSON of."""
    if isinstance(value, list):
        return [decoded(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return np.frombuffer(base64.b64decode(value["array"]), value["of"]).reshape(value["shape"])
    (kind, content), *_ = value.items()
    if kind == "dict":
        return {k: decoded(v) for k, v in content.items()}
    if kind in ("sparse", "view", "made"):
        return {"sparse": Sparse, "view": View, "made": Made}[kind](*map(decoded, content))
    make = {"tuple": lambda h: tuple(decoded(v) for v in h), "dtype": np.dtype, "complex": lambda h: complex(*h)}
    return {**make, "slice": lambda h: slice(*h)}[kind](content)


# the base of a view as an array, and the view of its Tensor
VIEWS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Callable[[Any], Any]]] = {
    "every second": (lambda a: np.repeat(a, 2, axis=-1), lambda t: t[..., ::2]),
    "backwards": (lambda a: a[::-1].copy(), lambda t: t[::-1]),
    "part": (lambda a: np.concatenate([a, a]), lambda t: t[t.shape[0] // 2 :]),
    "transposed": (lambda a: np.ascontiguousarray(a.T), lambda t: t.transpose(list(range(t.ndim))[::-1])),
    "row": (lambda a: np.stack([a, a]), lambda t: t[1]),
    "bfloat16": (lambda a: a, lambda t: t.astype("bfloat16")),
}


class Side:
    """Calls made in one framework."""

    same: dict[Any, Any] | None = None  # the Tensors of a call whose equal arguments are one
    unfilled: list[Any]  # parameters of a Program, which get their values when it is there

    def __init__(self, framework: str) -> None:
        self.paddle = importlib.import_module(framework)
        self.name = framework

    def outcome(self, call: dict[str, Any]) -> dict[str, Any]:
        """What came of a call: results and gradients as arrays, or the error."""
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                return self._run(call)
        except Exception as error:  # noqa: BLE001  (whatever a framework raises is the outcome)
            return {"error": f"{type(error).__name__}: {error}"[:300]}

    def _run(self, call: dict[str, Any]) -> dict[str, Any]:
        self.paddle.seed(7)
        if "code" in call:
            return self._executed(call)
        if "steps" in call.get("layer", {}):
            return self._trained(call)
        if call.get("way") in ("program", "open"):
            return self._recorded(call)
        leaves: list[Any] = []
        self.same: dict[Any, Any] | None = {} if call.get("aliased") else None
        args, kwargs = self._tensors(decoded(call["args"]), leaves), self._tensors(decoded(call["kwargs"]), leaves)
        function = self._function(call, leaves)
        if call.get("way") == "captured":
            outs = self._flat(self.paddle.jit.to_static(through(function))(args, kwargs))
        else:
            outs = self._flat(function(*args, **kwargs))
        outcome = {"outs": [encoded(self._array(o)) for o in outs]}
        if call.get("grad"):
            try:
                outcome["grads"] = [
                    None if g is None else encoded(self._array(g)) for g in self._gradients(outs, leaves)
                ]
            except Exception as error:  # noqa: BLE001
                outcome["grad_error"] = f"{type(error).__name__}: {error}"[:300]
        return outcome

    def _executed(self, call: dict[str, Any]) -> dict[str, Any]:
        """What code gives: an expression, or a function without parameters, in the names of Snippet."""
        if self.name == "polyreme":
            importlib.import_module("polyreme.paddle_scripts").as_paddle()
        static = self.paddle.static
        if call["way"] != "program":
            snippet = Snippet(self, recording=False)
            outs = snippet.outcome(call["code"])
            outcome = {"outs": [encoded(self._array(o)) for o in outs]}
            try:
                gradients = self._gradients(outs, snippet.leaves, create_graph=call["way"] == "double")
                if call["way"] == "double":
                    gradients = self._gradients([g for g in gradients if g is not None], snippet.leaves)
                outcome["grads"] = [None if g is None else encoded(self._array(g)) for g in gradients]
            except Exception as error:  # noqa: BLE001
                outcome["grad_error"] = f"{type(error).__name__}: {error}"[:300]
            return outcome
        program, startup, snippet = static.Program(), static.Program(), Snippet(self, recording=True)
        self.paddle.enable_static()
        try:
            with static.program_guard(program, startup):
                outs = snippet.outcome(call["code"])
            executor = static.Executor()
            executor.run(startup)
            for number, parameter in enumerate(snippet.unfilled):
                held = static.global_scope().find_var(parameter.name).get_tensor()
                held.set(wave(tuple(parameter.shape), number).astype(_name(parameter.dtype)), self.paddle.CPUPlace())
            fetched = [o for o in outs if hasattr(o, "stop_gradient")]
            values = iter(executor.run(program, feed=snippet.feed, fetch_list=fetched) if fetched else [])
            return {"outs": [encoded(self._array(next(values) if hasattr(o, "stop_gradient") else o)) for o in outs]}
        finally:
            self.paddle.disable_static()

    def _recorded(self, call: dict[str, Any]) -> dict[str, Any]:
        """What a Program that holds the call gives; way "open": its first feed may have any size."""
        static, feed = self.paddle.static, {}

        def data(value: Any) -> Any:
            if isinstance(value, Made):
                return self._made(value)
            if isinstance(value, View):
                base, view = VIEWS[value.how]
                return view(data(base(value.array)))
            if isinstance(value, Sparse):
                dense = data(value.array)
                return dense.to_sparse_csr() if value.layout == "csr" else dense.to_sparse_coo(dense.ndim)
            name = next((n for n, a in feed.items() if call.get("aliased") and equal(a, value)), f"x{len(feed)}")
            if name in feed:
                return program.global_block().var(name)
            shape = [-1] * value.ndim if call["way"] == "open" and not feed else value.shape
            feed[name] = value
            return static.data(name, shape, value.dtype.name)

        program, startup = static.Program(), static.Program()
        self.paddle.enable_static()
        try:
            with static.program_guard(program, startup):
                self.unfilled = []
                function = self._function(call, [])
                args, kwargs = (mapped(decoded(call[part]), data) for part in ("args", "kwargs"))
                outs = self._flat(function(*args, **kwargs))
            executor = static.Executor()
            if self.unfilled:
                executor.run(startup)
                self._fill(self.unfilled)
            return {"outs": [encoded(self._array(o)) for o in executor.run(program, feed=feed, fetch_list=outs)]}
        finally:
            self.paddle.disable_static()

    def _trained(self, call: dict[str, Any]) -> dict[str, Any]:
        """Parameters after steps of an optimizer: args are their values and their gradients."""
        paddle, static, program = self.paddle, self.paddle.static, call.get("way") == "program"
        arrays, gradients = decoded(call["args"])
        settings = {k: self._tensors(v, []) for k, v in decoded(call["layer"]["kwargs"]).items()}

        def loss(parameters: list[Any], values: list[Any]) -> Any:
            terms = [(p * g).sum().astype("float32") for p, g in zip(parameters, values, strict=True)]
            return sum(terms[1:], terms[0])

        def parameters() -> list[Any]:
            return [paddle.create_parameter(list(a.shape), a.dtype.name) for a in arrays]

        def fill(parameters: list[Any]) -> None:
            for parameter, array in zip(parameters, arrays, strict=True):
                parameter.set_value(array)

        optimizer_class = getattr(paddle.optimizer, call["path"].rpartition(".")[2])
        if program:
            paddle.enable_static()
            try:
                main, startup = static.Program(), static.Program()
                with static.program_guard(main, startup):
                    trained = parameters()
                    feeds = [static.data(f"g{n}", g.shape, g.dtype.name) for n, g in enumerate(gradients)]
                    optimizer_class(**settings).minimize(loss(trained, feeds))
                executor = static.Executor()
                executor.run(startup)
                fill(trained)
                for _ in range(call["layer"]["steps"]):
                    executor.run(main, feed={f"g{n}": g for n, g in enumerate(gradients)}, fetch_list=[])
                return {
                    "outs": [encoded(self._array(static.global_scope().find_var(p.name).get_tensor())) for p in trained]
                }
            finally:
                paddle.disable_static()
        trained = parameters()
        fill(trained)
        optimizer = optimizer_class(parameters=trained, **settings)

        def step(values: list[Any]) -> Any:
            total = loss(trained, values)
            total.backward()
            optimizer.step()
            optimizer.clear_grad()
            return total

        if call.get("way") == "captured":
            step = paddle.jit.to_static(step)
        for _ in range(call["layer"]["steps"]):
            step([paddle.to_tensor(g) for g in gradients])
        return {"outs": [encoded(self._array(p)) for p in trained]}

    def _made(self, value: Made) -> Any:
        owner = self.paddle
        for part in value.path.split("."):
            owner = getattr(owner, part)
        return owner(*value.args)

    def _fill(self, parameters: list[Any]) -> None:
        for number, parameter in enumerate(parameters):
            parameter.set_value(wave(tuple(parameter.shape), number).astype(str(np.dtype(_name(parameter.dtype)))))

    def _function(self, call: dict[str, Any], leaves: list[Any]) -> Any:
        path = call["path"].split(".")
        if path[0] == "Tensor":
            return changing(path[1]) if path[1].endswith("_") else method(path[1])
        owner = self.paddle
        for at, part in enumerate(path[1:], 2):
            if not hasattr(owner, part):
                importlib.import_module(".".join([self.name, *path[1:at]]))
            owner = getattr(owner, part)
        if "layer" in call:
            given = [self._tensors(decoded(call["layer"][part]), leaves) for part in ("args", "kwargs")]
            layer = owner(*given[0], **given[1])
            if "method" in call["layer"]:
                return getattr(layer, call["layer"]["method"])
            (layer.eval if call["layer"].get("eval") else layer.train)()
            # PaddlePaddle counts running statistics among the parameters
            trained = [p for p in layer.parameters() if not p.stop_gradient]
            if call.get("way") in ("program", "open"):
                self.unfilled = trained
            else:
                self._fill(trained)
            leaves += trained
            return layer
        return owner

    def _tensors(self, value: Any, leaves: list[Any]) -> Any:
        if isinstance(value, np.dtype):
            return value.name
        if isinstance(value, np.ndarray):
            key = (value.dtype.name, value.shape, value.tobytes())
            if self.same is not None and key in self.same:
                return self.same[key]
            tensor = self.paddle.to_tensor(value)
            if value.dtype.kind in "fc":
                tensor.stop_gradient = False
                leaves.append(tensor)
            if self.same is not None:
                self.same[key] = tensor
            return tensor
        if isinstance(value, Made):
            return self._made(value)
        if isinstance(value, View):
            base, view = VIEWS[value.how]
            return view(self._tensors(base(value.array), leaves))
        if isinstance(value, Sparse):
            dense = self._tensors(value.array, leaves)
            return dense.to_sparse_csr() if value.layout == "csr" else dense.to_sparse_coo(dense.ndim)
        if isinstance(value, (list, tuple)):
            return type(value)(self._tensors(v, leaves) for v in value)
        if isinstance(value, dict):
            return {k: self._tensors(v, leaves) for k, v in value.items()}
        return value

    def _gradients(self, outs: list[Any], leaves: list[Any], create_graph: bool = False) -> list[Any]:
        wanted, weights, more = [], [], {"allow_unused": True, "create_graph": create_graph}
        for number, out in enumerate(outs):
            array = np.asarray(self._array(out))
            if array.dtype.kind in "fc" and not getattr(out, "stop_gradient", True):
                wanted.append(out)
                weights.append(wave(array.shape, number).astype(array.real.dtype))
        # a complex output counts by its real and imaginary parts, weighted apart
        if len(wanted) == 1:
            (out,), (weight,) = wanted, weights
            cotangent = self.paddle.to_tensor(
                weight if _is_real(out) else weight + weight.dtype.type(0.5) * 1j * weight
            )
            return self.paddle.grad(wanted, leaves, grad_outputs=[cotangent.astype(out.dtype)], **more)
        # PaddlePaddle's process may end in the gradients of several results, unless they are added up
        terms = []
        for out, weight in zip(wanted, map(self.paddle.to_tensor, weights), strict=True):
            parts = (out,) if _is_real(out) else (self.paddle.real(out), 0.5 * self.paddle.imag(out))
            terms += [(part * weight).sum() for part in parts]
        return self.paddle.grad([sum(terms[1:], terms[0])], leaves, **more) if terms else [None] * len(leaves)

    def _flat(self, value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [t for v in value.values() for t in self._flat(v)]
        if isinstance(value, (list, tuple)):
            return [t for v in value for t in self._flat(v)]
        if hasattr(value, "is_sparse") and not isinstance(value, type) and value.is_sparse():
            value = value.to_dense()
        return [] if value is None else [value]

    def _array(self, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        if _name(getattr(value, "dtype", "")) == "bfloat16":
            value = value.astype("float32")
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
        return type(value).__name__ if array.dtype.kind == "O" else array


class Snippet:
    """The names that code of the table of values is written in; what it makes is data of a Program when recording."""

    def __init__(self, side: Side, recording: bool) -> None:
        self.side, self.recording = side, recording
        self.leaves: list[Any] = []
        self.feed: dict[str, np.ndarray] = {}
        self.unfilled: list[Any] = []

    def outcome(self, code: str) -> list[Any]:
        """Everything that the code's value is made of, Tensors or plain values."""
        paddle = self.side.paddle
        names = {name: getattr(self, name) for name in ("t", "unit", "ids", "c", "L", "sparse")}
        names |= {"paddle": paddle, "np": np, "nn": paddle.nn, "F": paddle.nn.functional, "recording": self.recording}
        if code.startswith("def "):
            exec(code, names)
            return self.side._flat(names[code[4:].partition("(")[0]]())
        return self.side._flat(eval(code, names))

    def t(self, *shape: Any, dtype: str | None = None, sg: bool = False) -> Any:
        """A Tensor of sizes, with values in (-2, 2), or of an array or list; wants a gradient unless sg."""
        if all(type(n) is int for n in shape):
            array = (2 * self._wave(shape)).astype("float32")
        else:
            (given,) = shape
            array = np.asarray(given, None if isinstance(given, np.ndarray) else "float32")
        with np.errstate(all="ignore"):
            array = array if dtype in (None, "bfloat16") else array.astype(dtype)
        if self.recording:
            name = f"t{len(self.feed)}"
            self.feed[name] = array
            tensor = self.side.paddle.static.data(name, array.shape, array.dtype.name)
        else:
            tensor = self.side.paddle.to_tensor(array)
        tensor = tensor.astype("bfloat16") if dtype == "bfloat16" else tensor
        if not sg and (array.dtype.kind in "fc"):
            tensor.stop_gradient = False
            self.leaves.append(tensor)
        return tensor

    def _wave(self, shape: tuple[int, ...]) -> np.ndarray:
        """Values in (-1, 1); squared numbers, so that matrices of them have full rank."""
        count = np.arange(np.prod(shape, dtype=int))
        return np.sin(2.3 * count + 0.13 * count**2 + 0.7 + len(self.leaves)).reshape(shape)

    def unit(self, *shape: int, **more: Any) -> Any:
        """As t, with values in (0.05, 0.95)."""
        return self.t((0.5 + 0.45 * self._wave(shape)).astype("float32"), **more)

    def c(self, *shape: int, dtype: str = "complex64") -> Any:
        """A complex Tensor."""
        return self.t((self._wave(shape) + 0.7j * self._wave(shape[::-1]).T).astype(dtype))

    def ids(self, high: int, *shape: int, dtype: str = "int64") -> Any:
        """Integers below high."""
        return self.t((np.arange(np.prod(shape, dtype=int)) * 7 % high).reshape(shape).astype(dtype))

    def L(self, layer: Any) -> Any:
        """The layer with parameters that both sides can make, which are differentiated."""
        trained = [p for p in layer.parameters() if not p.stop_gradient]
        if self.recording:
            self.unfilled += trained
        else:
            self.side._fill(trained)
        self.leaves += trained
        return layer

    def sparse(self, dense: Any, layout: str = "coo") -> Any:
        """A dense Tensor as a sparse one."""
        return dense.to_sparse_csr() if layout == "csr" else dense.to_sparse_coo(dense.ndim)


def method(name: str) -> Any:
    """A Tensor's method as a function."""
    return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)


def changing(name: str) -> Any:
    """A method that changes its Tensor, as a function of the Tensor: what it gives, and the Tensor that it changed."""

    def call(x: Any, *args: Any, **kwargs: Any) -> list[Any]:
        changed = x.clone()
        return [getattr(changed, name)(*args, **kwargs), changed]

    return call


def through(function: Any) -> Any:
    """function of a list and a dict, to be captured."""

    def call(args: list[Any], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    return call


def mapped(value: Any, change: Any) -> Any:
    """value with every array, view and object to be made changed, dtypes by their names."""
    if isinstance(value, (np.ndarray, View, Sparse, Made)):
        return change(value)
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(v, change) for v in value)
    if isinstance(value, dict):
        return {k: mapped(v, change) for k, v in value.items()}
    return value


def equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are the same bytes."""
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def wave(shape: tuple[int, ...], number: int) -> np.ndarray:
    """Values in (-1, 1) that no two neighbours share: parameters and weights that both sides can make."""
    size = int(np.prod(shape))
    return np.cos(1.7 * np.arange(size) + number + 0.3).reshape(shape)


def _is_real(tensor: Any) -> bool:
    return not _name(tensor.dtype).startswith("complex")


def _name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


def main() -> None:
    framework, calls, results, *part = sys.argv[1:]
    first, end = map(int, part)
    side = Side(framework)
    with open(calls) as given, open(results, "a") as out:
        for number, line in enumerate(given):
            if first <= number < end:
                out.write(json.dumps(side.outcome(json.loads(line))) + "\n")
                out.flush()


if __name__ == "__main__":
    main()
