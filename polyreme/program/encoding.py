"""Values of Programs as JSON: arguments of operations, arrays, and the objects that initialize, update and schedule.

What JSON has is itself; everything else is an object of one key that begins with "$". Objects are looked up
among the classes that are declared here: reading a file imports nothing and calls no function that it names.
"""

from __future__ import annotations

import base64
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from polyreme.core import amp_policy
from polyreme.core import dtype as dtypes
from polyreme.core.state import TensorState
from polyreme.core.symbol import Symbol
from polyreme.eager.tensor import Tensor
from polyreme.errors import CheckpointError, ProgramError, did_you_mean
from polyreme.io.complex_pairs import from_pairs
from polyreme.nn.clip import GradientClip
from polyreme.nn.initializer import Initializer
from polyreme.nn.parameter import Parameter
from polyreme.optimizer.lr import LRScheduler
from polyreme.optimizer.optimizer import Optimizer
from polyreme.program.values import Ref, SizeOf
from polyreme.regularizer import WeightDecayRegularizer

_BASES: dict[str, type] = {
    "$initializer": Initializer,
    "$scheduler": LRScheduler,
    "$clip": GradientClip,
    "$regularizer": WeightDecayRegularizer,
}
_TYPES: dict[str, type] = {t.__name__: t for t in (bool, int, float, complex)}
_SHOWN = 64  # elements; whole numbers up to so many are written as such, so that a listing of the file can be read
_NO_STATE = ("_observers", "_hooks")  # of objects: who listens is not what they are

Arrays = dict[str, np.ndarray]


def class_name(cls: type) -> str:
    """What a file calls a class: its package here and its name; of a class from elsewhere the whole module."""
    first, _, rest = cls.__module__.partition(".")
    return f"{rest.partition('.')[0] if first == 'polyreme' else cls.__module__}.{cls.__qualname__}"


def _class(base: type, name: Any, what: str) -> Any:
    known, left = {}, [base]
    while left:
        cls = left.pop()
        known[class_name(cls)] = cls
        left += cls.__subclasses__()
    if name not in known:
        raise CheckpointError(
            f"the Program has the {what} {name!r}, which is not declared here{did_you_mean(str(name), known)}; import "
            "the module that declares it before loading"
        )
    return known[name]


class Encoder:
    """Makes JSON of values. arrays: takes arrays by name; None writes them into the JSON. blocks: id -> index.

    One object met twice (a scheduler of two optimizers) is written once.
    """

    def __init__(self, arrays: Arrays | None, blocks: Mapping[int, int]) -> None:
        self._arrays = arrays
        self._blocks = blocks
        self._seen: dict[int, tuple[int, Any]] = {}

    def encode(self, value: Any, where: str) -> Any:
        """value as JSON; where: says in errors what it is. Raises ProgramError for what no file can hold."""
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if type(value) is list:
            return [self.encode(v, where) for v in value]
        if type(value) is dict:
            return self._dict(value, where)
        if id(value) in self._blocks:
            return {"$block": self._blocks[id(value)]}
        simple = self._simple(value, where)
        return simple if simple is not None else self._object(value, where)

    def _dict(self, value: dict, where: str) -> Any:
        if all(type(k) is str and not k.startswith("$") for k in value):
            return {k: self.encode(v, f"{where}[{k!r}]") for k, v in value.items()}
        return {"$dict": [[self.encode(k, where), self.encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}

    def _simple(self, value: Any, where: str) -> Any:
        if isinstance(value, Ref):
            return {"$ref": value.name}
        if isinstance(value, SizeOf):
            return {"$size": [value.name, value.dim]}
        if type(value) in (tuple, set, frozenset):
            listed = value if type(value) is tuple else sorted(value, key=repr)
            return {f"${type(value).__name__}": [self.encode(v, where) for v in listed]}
        if isinstance(value, slice):
            return {"$slice": [self.encode(v, where) for v in (value.start, value.stop, value.step)]}
        if isinstance(value, range):
            return {"$range": [value.start, value.stop, value.step]}
        if value is Ellipsis:
            return {"$ellipsis": True}
        if isinstance(value, complex) and type(value) is complex:
            return {"$complex": [self.encode(value.real, where), self.encode(value.imag, where)]}
        if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
            return {"$dtype": dtypes.as_dtype(value).name}
        if isinstance(value, type) and value in _TYPES.values():
            return {"$type": value.__name__}
        if isinstance(value, TensorState):
            return self._named(value, where)
        if isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "addressable_data"):
            return self.array(np.asarray(value), isinstance(value, np.generic))
        if isinstance(getattr(value, "dtype", None), np.dtype):  # a dtype under another name
            return {"$dtype": dtypes.as_dtype(value).name}
        return None

    def _named(self, value: Any, where: str) -> Any:
        return {"$var": value._array.name if isinstance(value._array, Symbol) else value.name}

    def array(self, value: np.ndarray, scalar: bool = False, name: str | None = None) -> Any:
        """An array; name: what it is called among the arrays, if it has a name."""
        dtype = dtypes.as_dtype(value.dtype)
        body: dict[str, Any] = {"dtype": dtype.name, "shape": list(value.shape)}
        if scalar:
            body["scalar"] = True
        if name is None and value.size <= _SHOWN and dtype.kind in "iub":
            body["values"] = value.reshape(-1).tolist()
            return {"$array": body}
        plain = np.asarray(value, order="C")
        if self._arrays is None:
            body["base64"] = base64.b64encode(plain.tobytes()).decode()
            return {"$array": body}
        body["name"] = name if name is not None else f"@constant_{len(self._arrays)}"
        self._arrays[body["name"]] = plain
        return {"$array": body}

    def _object(self, value: Any, where: str) -> Any:
        if id(value) in self._seen:
            return {"$again": self._seen[id(value)][0]}
        body = self._described(value, where)
        if body is None:
            kind = "the function" if callable(value) and not isinstance(value, type) else "a value of class"
            shown = getattr(value, "__qualname__", type(value).__name__)
            raise ProgramError(
                f"{where} is {kind} {shown}, which cannot be written into a file; "
                + (
                    "express it with ops, or make the object anew where the Program is loaded"
                    if callable(value)
                    else "give a number, string, list, dict or array instead"
                )
            )
        number = len(self._seen)
        self._seen[id(value)] = (number, value)
        return {**body, "id": number}

    def _described(self, value: Any, where: str) -> dict[str, Any] | None:
        name = class_name(type(value))
        if isinstance(value, amp_policy.Policy):
            return {"$policy": {k: self.encode(v, where) for k, v in vars(value).items()}}
        if isinstance(value, Optimizer):
            given = _arguments(value)
            return {
                "$optimizer": name,
                "given": {k: self.encode(v, f"{where}: {k}") for k, v in given.items()},
                "groups": [
                    {"params": [p.name for p in g.params], "settings": self.encode(g.settings, f"{where}: a group")}
                    for g in value._groups
                    if g.settings
                ],
            }
        for tag, base in _BASES.items():
            if isinstance(value, base):
                fields = {k: v for k, v in vars(value).items() if k not in _NO_STATE}
                encoded = {k: self.encode(v, f"{where}: {type(value).__name__}.{k}") for k, v in fields.items()}
                return {tag: name, "fields": encoded}
        return None


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer was made with, parameters excepted, its rate as it is now."""
    arguments = optimizer.keywords()
    if "learning_rate" in inspect.signature(type(optimizer).__init__).parameters:
        rate = optimizer.rate_variable
        scheduled = rate if rate is not None else optimizer._scheduler
        arguments["learning_rate"] = scheduled if scheduled is not None else optimizer.get_lr()
    arguments.pop("parameters", None)  # groups say which have settings, the pairs of the operation say which there are
    return arguments


class ValueDecoder:
    """Makes values of JSON. arrays: name -> array; blocks: by index; variable: name -> what has this name."""

    def __init__(self, arrays: Mapping[str, np.ndarray], blocks: list[Any], variable: Callable[[str], Any]) -> None:
        self._arrays = arrays
        self._blocks = blocks
        self._variable = variable
        self._decoded: dict[int, Any] = {}
        self._kinds: dict[str, Callable[[Any, dict], Any]] = {
            "$float": lambda v, _: float(v),
            "$dict": lambda v, _: {_hashable(self.decode(k)): self.decode(x) for k, x in v},
            "$block": lambda v, _: self._blocks[_index(v)],
            "$ref": lambda v, _: Ref(_text(v)),
            "$size": lambda v, _: SizeOf(_text(v[0]), _index(v[1])),
            "$tuple": lambda v, _: tuple(self.decode(x) for x in v),
            "$set": lambda v, _: {self.decode(x) for x in v},
            "$frozenset": lambda v, _: frozenset(self.decode(x) for x in v),
            "$slice": lambda v, _: slice(*(self.decode(x) for x in v)),
            "$range": lambda v, _: range(*v),
            "$ellipsis": lambda v, _: Ellipsis,
            "$complex": lambda v, _: complex(self.decode(v[0]), self.decode(v[1])),
            "$dtype": lambda v, _: dtypes.as_dtype(_text(v)),
            "$type": lambda v, _: _TYPES[v],
            "$var": lambda v, _: self._variable(_text(v)),
            "$array": lambda v, _: self.array(v),
            "$again": lambda v, _: self._decoded[v],
            "$policy": lambda v, _: amp_policy.Policy(**{k: self.decode(x) for k, x in v.items()}),
            "$optimizer": self._optimizer,
            **{tag: self._of_fields(tag) for tag in _BASES},
        }

    def decode(self, node: Any) -> Any:
        """The value; raises CheckpointError, or what Python raises for a node that is not as it should be."""
        if isinstance(node, list):
            return [self.decode(v) for v in node]
        if not isinstance(node, dict):
            return node
        tag = next((k for k in node if k.startswith("$")), None)
        if tag is None:
            return {k: self.decode(v) for k, v in node.items()}
        if tag not in self._kinds:
            raise CheckpointError(f"the Program has a value of kind {tag!r}, which is not known here; upgrade polyreme")
        made = self._kinds[tag](node[tag], node)
        if "id" in node:
            self._decoded[node["id"]] = made
        return made

    def array(self, body: Mapping[str, Any]) -> Any:
        """An array of its description."""
        dtype, shape = dtypes.as_dtype(_text(body["dtype"])), tuple(_index(n) for n in body["shape"])
        if "values" in body:
            array = np.asarray(body["values"], dtype).reshape(shape)
        elif "base64" in body:
            array = np.frombuffer(base64.b64decode(body["base64"], validate=True), dtype).reshape(shape).copy()
        else:
            name = _text(body["name"])
            if name not in self._arrays:
                raise CheckpointError(f"the values of {name!r} are missing; they are kept beside the Program")
            array = from_pairs(np.asarray(self._arrays[name]), dtype)
            if array.dtype != dtype or array.shape != shape:
                raise CheckpointError(
                    f"{name!r} is {array.dtype.name}{list(array.shape)}, the Program says {dtype.name}{list(shape)}"
                )
        return array[()] if body.get("scalar") else array

    def _of_fields(self, tag: str) -> Callable[[Any, dict], Any]:
        def make(name: Any, node: dict) -> Any:
            cls = _class(_BASES[tag], name, tag[1:])
            made = cls.__new__(cls)
            made.__dict__.update({k: self.decode(v) for k, v in node["fields"].items()})
            return made

        return make

    def _optimizer(self, name: Any, node: dict) -> Optimizer:
        cls = _class(Optimizer, name, "optimizer")
        rate = node["given"].get("learning_rate")
        computed = isinstance(rate, dict) and "$var" in rate  # the startup Program has the optimizer, but not its rate
        given = {k: 0.0 if computed and v is rate else self.decode(v) for k, v in node["given"].items()}
        given["parameters"] = [
            {"params": [_placeholder(n) for n in g["params"]], **self.decode(g["settings"])} for g in node["groups"]
        ]
        made = cls(**given)
        if computed:
            made.rate_variable = Tensor(Symbol(_text(rate["$var"]), (), made._rate_dtype))
        return made


def _placeholder(name: Any) -> Parameter:
    """A parameter that says which group one of its name is in; the startup Program need not have it."""
    made = Parameter.__new__(Parameter)
    Tensor.__init__(made, Symbol(_text(name), (), dtypes.float32), stop_gradient=False)
    made.name = name
    return made


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} where a name is needed")
    return value


def _index(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} where a whole number from 0 is needed")
    return value


def _hashable(value: Any) -> Any:
    hash(value)
    return value
