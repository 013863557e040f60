"""Tensor: an array with the tape behind it, its operators and its methods.

Methods that are ops come from the op tables (eager.methods); here stands what needs the Tensor itself.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.devices import place as places
from polyreme.core.devices.abstract import Abstract
from polyreme.core.op import recorded
from polyreme.core.state import TensorState
from polyreme.core.symbol import Symbol
from polyreme.eager import tape, views, walk
from polyreme.eager.casts import Casts
from polyreme.eager.dispatch import rebind, refuse_copy, written
from polyreme.eager.dist_members import DistMembers
from polyreme.eager.host import as_array, like, put
from polyreme.eager.index import check_mask, split_index, value_of, without_bools
from polyreme.eager.memory import ElementCount, MemoryMembers, Size
from polyreme.eager.methods import OpMethods
from polyreme.eager.rewriting import Rewriting
from polyreme.eager.sparse.members import SparseMembers
from polyreme.errors import ConfigError, DTypeError, GradError, ShapeError
from polyreme.ops import OPS, creation, manipulation
from polyreme.ops import arithmetic as ar
from polyreme.ops.indices import subscripts

_names = itertools.count()
_new: Any = object.__new__
_new_list: Any = list.__new__
_watch = state.watch
print_options: dict[str, Any] = {"threshold": 1000, "precision": 8}
"""What set_printoptions changes, as NumPy's printoptions."""


class Tensor(TensorState, SparseMembers, DistMembers, Casts, MemoryMembers, Rewriting, OpMethods):
    """A multi-dimensional array that ops read and write, on a device or spread over a mesh.

    stop_gradient=True (the default) keeps it out of differentiation. Tensors hash by identity; == is elementwise.

    >>> x = to_tensor([1.0, 2.0], stop_gradient=False)
    >>> (x * x).sum().backward()
    >>> x.grad.tolist()
    [2.0, 4.0]
    """

    stop_gradient: bool
    __hash__: ClassVar[Callable[[Any], int]] = object.__hash__
    __array_ufunc__ = None  # ndarray + Tensor asks Tensor; a NumPy function of a Tensor says so instead of copying it

    def __init__(
        self, data: Any, dtype: Any = None, place: Any = None, stop_gradient: bool = True, *, zero_copy: bool = False
    ) -> None:
        """zero_copy is taken for scripts that give it: whether a value is copied is not seen in what it becomes."""
        array = (
            data
            if isinstance(data, (jax.Array, Symbol, Abstract, state.Elsewhere)) and dtype is None and place is None
            else as_array(data, dtype, place)
        )
        super().__init__(array, stop_gradient)

    # what it is

    @property
    def shape(self) -> Size:
        """Size of each dim; in a static Program -1 for one that is not known."""
        size: Size = _new_list(Size)  # as Size.of does, without its call
        size.extend(self._array.shape)
        return size

    @property
    def dtype(self) -> np.dtype:
        return self._array.dtype

    @property
    def ndim(self) -> int:
        return self._array.ndim

    @property
    def size(self) -> int:
        """Number of elements; called, the sizes of the dims: size(), or of one: size(0)."""
        array = self._array
        count = array.size
        return ElementCount.of(array.shape, count) if isinstance(count, int) else count

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self._array.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole Tensor."""
        return self._array.size * self._array.dtype.itemsize

    @property
    def place(self) -> places.Place:
        """The device that holds it (this process's first one, if it is spread over a mesh)."""
        if isinstance(self._array, state.Tracer):
            return places.default_place()
        here = self._array.sharding.addressable_devices
        return places.as_place(min(here, key=lambda d: d.id)) if here else places.default_place()

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """The layout over devices."""
        return self._array.sharding

    @property
    def name(self) -> str:
        if "_name" not in self.__dict__:
            self._name = f"generated_tensor_{next(_names)}"
        return self._name

    @name.setter
    def name(self, value: str) -> None:
        self._name = value

    @property
    def persistable(self) -> bool:
        """True for what a checkpoint holds: parameters and buffers."""
        return self.__dict__.get("_persistable", False)

    @persistable.setter
    def persistable(self, value: bool) -> None:
        self._persistable = value

    def dim(self) -> int:
        """Number of dims."""
        return self._array.ndim

    ndimension = dim

    def element_size(self) -> int:
        """Bytes per element."""
        return self._array.dtype.itemsize

    def is_floating_point(self) -> bool:
        return dtypes.is_floating(self.dtype)

    def is_complex(self) -> bool:
        return dtypes.is_complex(self.dtype)

    def is_integer(self) -> bool:
        return dtypes.is_integer(self.dtype)

    def is_dense(self) -> bool:
        return True

    def is_contiguous(self) -> bool:
        return True

    def contiguous(self) -> Tensor:
        """Itself: arrays are always contiguous here."""
        return self

    # on the host

    def numpy(self, *_: Any) -> np.ndarray:
        """A copy of the value as an ndarray. Arguments, such as numpy(False), change nothing.

        One that lies in pieces over processes is gathered: every process with a piece must call this, as it must a
        collective, the whole value crosses the network, and each of them holds it. Where one calls something else or
        nothing, the others get a RankError or are ended by the watchdog. item(), tolist(), float() and the like do the
        same.
        """
        return np.array(state.host(self, "Tensor.numpy()"))

    def item(self, *args: int) -> Any:
        """One element as a Python number; without an index the Tensor must have exactly one."""
        value = state.host(self, "Tensor.item()")
        if not args and value.size != 1:
            raise ShapeError(f"item() needs a Tensor with one element, got shape {list(self.shape)}; index it first")
        return value.item(*args)

    def tolist(self) -> Any:
        """The value as nested lists of Python numbers."""
        return state.host(self, "Tensor.tolist()").tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = state.host(self, "numpy.asarray(Tensor)")
        return value.astype(dtype) if dtype is not None else np.array(value)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        state.host(self, "Tensor.__dlpack__()")
        return self._array.__dlpack__(*args, **kwargs)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __float__(self) -> float:
        return float(self._real("float(Tensor)"))

    def __int__(self) -> int:
        return int(self._real("int(Tensor)"))

    __long__ = __int__

    def __index__(self) -> int:
        if not dtypes.is_integer(self.dtype):
            raise DTypeError(f"only an integer Tensor can be an index, got {self.dtype.name}")
        return int(self._scalar("using a Tensor as a Python integer"))

    def __complex__(self) -> complex:
        return complex(self._scalar("complex(Tensor)"))

    def __bool__(self) -> bool:
        return bool(self._scalar("bool(Tensor), as in `if tensor:`"))

    __nonzero__ = __bool__

    def _real(self, what: str) -> Any:
        value = self._scalar(what)
        if np.iscomplexobj(value):
            raise DTypeError(f"{what} of a {self.dtype.name} one; take .real(), .abs() or complex(Tensor)")
        return value

    def _scalar(self, what: str) -> Any:
        value = state.host(self, what)
        if value.size != 1:
            raise ShapeError(
                f"{what} needs a Tensor with one element, got shape {list(self.shape)}; use .any() or .all(), or index "
                "it"
            )
        return value.reshape(())[()]

    def __len__(self) -> int:
        if not self._array.ndim:
            raise TypeError("a 0-D Tensor has no len()")
        if self._array.shape[0] < 0:
            raise TypeError(f"{self!r} has no len(): its first dim is not known before the Program runs")
        return self._array.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        if not self._array.ndim:
            raise TypeError("a 0-D Tensor cannot be iterated over")
        return (self[i] for i in range(len(self)))

    def __contains__(self, value: Any) -> bool:
        return bool(np.any(state.host(self, "value in Tensor") == np.asarray(value)))

    def __repr__(self) -> str:
        if isinstance(self._array, Symbol):
            return f"Variable({self._array!r}, stop_gradient={self.stop_gradient})"
        if isinstance(self._array, state.Tracer):
            return f"Tensor(shape={list(self.shape)}, dtype={self.dtype.name}, captured)"
        facts = (
            f"shape={list(self.shape)}, dtype={self.dtype.name}, place={self.place}, stop_gradient={self.stop_gradient}"
        )
        if not (self._array.is_fully_addressable or self._array.is_fully_replicated):
            return f"Tensor({facts}, in pieces over several processes)"
        with np.printoptions(**print_options):
            value = np.array2string(np.asarray(self._array), separator=", ")
        return f"Tensor({facts}{self._dist_facts() or ','}\n       {value.replace(chr(10), chr(10) + ' ' * 7)})"

    def __format__(self, spec: str) -> str:
        """A 0-D Tensor as its number, and so is one of one element with a spec; others as their repr."""
        has_value = not isinstance(self._array, (state.Tracer, Symbol, Abstract))
        if has_value and (not self._array.ndim or (spec and self.size == 1)):
            return format(self.item(), spec)
        return format(repr(self), spec)

    # gradients

    @property
    def is_leaf(self) -> bool:
        """True if no taped op made it."""
        return self._node is None

    @property
    def grad(self) -> Tensor | None:
        """The gradient that backward() has accumulated, or None; zeros after clear_grad(set_to_zero=True)."""
        if self._grad is None and self.__dict__.get("_reads_zero"):
            return Tensor(jnp.zeros(self._array.shape, self._array.dtype))
        return self._grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and tuple(value._array.shape) != tuple(self._array.shape):
            raise ShapeError(f"grad must have the Tensor's shape {list(self.shape)}, got {list(value.shape)}")
        state.touch(self)
        self._grad = value
        self._reads_zero = False

    def backward(
        self, grad_tensor: Tensor | None = None, retain_graph: bool = False, dump_backward_graph_path: str | None = None
    ) -> None:
        """Add d self / d leaf to leaf.grad for every leaf that wants a gradient.

        grad_tensor: what to start from, of this shape; ones by default. The tape is freed unless retain_graph.
        Raises ConfigError if a path for a picture of the graph is given: to_static's program can be read instead.
        """
        if dump_backward_graph_path is not None:
            raise ConfigError(
                "backward: dump_backward_graph_path is not supported; walk x.grad_fn.edges, or print the program of a "
                "function captured with to_static"
            )
        walk.backward([self], [grad_tensor], retain_graph)

    def gradient(self) -> np.ndarray | None:
        """The gradient as an ndarray, or None."""
        grad = self.grad
        return None if grad is None else grad.numpy()

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Forget the gradient; `.grad` then reads as zeros, of which none are kept in memory, or else as None."""
        had = self._grad is not None or self.__dict__.get("_reads_zero", False)
        self.grad = None
        self._reads_zero = set_to_zero and had

    def clear_gradient(self, set_to_zero: bool = True) -> None:
        """The same as clear_grad."""
        self.clear_grad(set_to_zero)

    def zero_grad(self) -> None:
        """The same as clear_grad."""
        self.clear_grad()

    @recorded
    def detach(self) -> Tensor:
        """The same value outside the tape."""
        return Tensor(state.read(self))

    def detach_(self) -> Tensor:
        """Leave the tape: a leaf from now on that wants no gradient."""
        state.write(self, state.read(self))
        self._node, self._index, self.stop_gradient = None, 0, True
        return self

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> HookHandle:
        """Call hook(gradient) when this Tensor's gradient is computed; what it returns, if anything, replaces it."""
        if not callable(hook):
            raise TypeError(f"register_hook takes a function of the gradient, got {type(hook).__name__}")
        if isinstance(self._array, Symbol):
            raise GradError(
                f"register_hook: {self._array!r} belongs to a static Program, whose gradients have no hooks; change "
                "the gradient with a PyLayer or static.nn.static_pylayer, or fetch it by its name"
            )
        if self.stop_gradient:
            raise GradError(
                "register_hook: this Tensor has stop_gradient=True, so no gradient reaches it; set it to False first"
            )
        if self._node is None:
            hooks = self.__dict__.setdefault("_hooks", {})
            key = object()
            hooks[key] = hook
            state.leaf_hooks.version += 1

            def remove() -> bool:
                state.leaf_hooks.version += 1
                return hooks.pop(key, None) is not None

            return HookHandle(remove)
        if self._node.hooks is None:
            self._node.hooks = {}
        listed = self._node.hooks.setdefault(self._index, [])
        listed.append(hook)
        return HookHandle(lambda: hook in listed and listed.remove(hook) is None)

    def retain_grads(self) -> None:
        """Keep .grad for this Tensor although it is not a leaf."""
        if self._node is not None:

            def keep(gradient: Tensor) -> None:
                self._grad = gradient

            self.register_hook(keep)

    # copies and devices

    def clone(self) -> Tensor:
        """A copy that gradients flow through."""
        return _copy(self)

    def astype(self, dtype: Any) -> Tensor:
        """The value in another dtype."""
        return ar.cast(self, dtypes.as_dtype(dtype))

    def to(
        self,
        *args: Any,
        device: Any = None,
        dtype: Any = None,
        blocking: bool | None = None,
        other: Any = None,
        non_blocking: bool = False,
        copy: bool = False,
    ) -> Tensor:
        """The value on another device and/or in another dtype: to("gpu:0"), to("float64"), to(other).

        copy: never the Tensor itself. No move blocks here, whatever blocking and non_blocking say.
        """
        device, dtype = destination(args if other is None else (*args, other), device, dtype)
        result = self if dtype is None or dtypes.as_dtype(dtype) == self.dtype else self.astype(dtype)
        result = result if device is None else _move(result, places.as_place(device))
        return result.clone() if copy and result is self else result

    def cpu(self) -> Tensor:
        """The value on the host's processor."""
        return _move(self, places.CPUPlace())

    def cuda(self, device_id: int | places.Place | None = None, blocking: bool = True) -> Tensor:
        """The value on a GPU, the first one if none is named; DeviceError if there is none."""
        where = device_id if isinstance(device_id, places.Place) else places.CUDAPlace(device_id or 0)
        return _move(self, where)

    def pin_memory(self, blocking: bool = True) -> Tensor:
        """Itself: transfers manage their own staging memory."""
        return self

    def set_value(self, value: Any) -> None:
        """Replace the value, keeping shape, dtype and layout over devices; not taped."""
        refuse_copy(self, "set_value")
        array = state.read(value) if isinstance(value, TensorState) else np.asarray(value)
        if isinstance(array, Symbol) or isinstance(self._array, Symbol):
            state.write(self, array)
            return
        if tuple(array.shape) != tuple(self._array.shape):
            raise ShapeError(f"set_value: the Tensor has shape {list(self.shape)}, the value {list(array.shape)}")
        state.write_value(self, like(array, self._array))
        written(self)

    @property
    def data(self) -> Tensor:
        """The value outside the tape. What is written to it in place is written to this Tensor, untaped.

        Assigned to, it replaces the value, with its shape and dtype. Inside a captured function or a static Program it
        is a copy, and writing to it in place raises GradError.
        """
        if state.watch.active is None:
            return _Data(self)
        copied = self.detach()
        copied.__dict__["_copy_of_data"] = True
        return copied

    @data.setter
    def data(self, value: Any) -> None:
        refuse_copy(self, "x.data = value")
        array = state.read(value if isinstance(value, TensorState) else to_tensor(value))
        same = isinstance(array, jax.Array) and (array.shape, array.dtype) == (self._array.shape, self._array.dtype)
        state.write_value(self, like(array, self._array) if same else array)
        self.__dict__["_version"] = self.inplace_version + 1
        written(self)

    def copy_(self, other: Any, blocking: bool = True) -> Tensor:
        """set_value, returning the Tensor."""
        self.set_value(other)
        return self

    def get_tensor(self) -> Tensor:
        return self

    def value(self) -> Tensor:
        return self

    def fill_(self, value: float) -> Tensor:
        """Every element set to value, in place; what it was made of gets gradient 0."""
        return rebind(self, _fill(self, value), "fill_")

    def zero_(self) -> Tensor:
        """Every element set to zero, in place."""
        return self.fill_(0)

    def __copy__(self) -> Tensor:
        return self.detach()

    def __deepcopy__(self, memo: dict[Any, Any]) -> Tensor:
        if self._node is not None:
            raise GradError(
                "only a leaf Tensor can be deep-copied; use clone() to copy with its history, detach() without"
            )
        copied = type(self).__new__(type(self))
        TensorState.__init__(copied, jnp.array(state.read(self), copy=True), self.stop_gradient)
        copied.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("_hooks", "_name")})
        memo[id(self)] = copied
        return copied

    # indexing

    @recorded
    def __getitem__(self, index: Any) -> Tensor:
        """The part that an index says. One of ints, slices, ... and None alone is a view: see eager.views."""
        index = _with_lists_joined(index)
        index, empty = without_bools(index, len(self._array.shape))
        if empty is not None:
            return self[index][(*[slice(None)] * empty, slice(0, 0))]
        arrays, spec = split_index(index, list(self._array.shape))
        part: Tensor = subscripts.getitem(self, arrays, spec)
        if ("array",) not in spec and not isinstance(self._array, Symbol):
            views.link(self, part, arrays, spec)
        return part

    def lasting_ref(self) -> Callable[[], Tensor | None]:
        """What gives this Tensor while something else holds it."""
        return weakref.ref(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(value, TensorState):
            value = np.asarray(value) if not isinstance(value, (bool, int, float, complex)) else value
            dtypes.check_holds("x[index] = value", self.dtype, value)
        index = _with_lists_joined(index)
        is_mask = isinstance(index, Tensor) and index.dtype == dtypes.bool_
        # a value that is the same in all places needs no number of them
        if is_mask and len(np.shape(value_of(value))) <= max(0, len(self._array.shape) - len(index._array.shape)):
            check_mask(index, list(self._array.shape))
            rebind(self, subscripts.setitem_where(self, value, index), "x[mask] = value")
            return
        index, empty = without_bools(index, len(self._array.shape))
        if empty is not None:
            return
        if state.recording():
            rebind(self, _with_item(self, index, value), "x[index] = value")
            return
        arrays, spec = split_index(index, list(self._array.shape))
        rebind(self, subscripts.setitem(self, value, arrays, spec), "x[index] = value", where=(arrays, spec))

    # operators

    def __add__(self, y: Any) -> Tensor:
        return ar.add(self, y)

    def __radd__(self, y: Any) -> Tensor:
        return ar.add(y, self)

    def __sub__(self, y: Any) -> Tensor:
        return ar.subtract(self, y)

    def __rsub__(self, y: Any) -> Tensor:
        return ar.subtract(y, self)

    def __mul__(self, y: Any) -> Tensor:
        return ar.multiply(self, y)

    def __rmul__(self, y: Any) -> Tensor:
        return ar.multiply(y, self)

    def __truediv__(self, y: Any) -> Tensor:
        return ar.divide(self, y)

    def __rtruediv__(self, y: Any) -> Tensor:
        return ar.divide(y, self)

    __div__ = __truediv__
    __rdiv__ = __rtruediv__

    def __lshift__(self, y: Any, is_arithmetic: bool = True) -> Tensor:
        return OPS["bitwise_left_shift"](self, y, is_arithmetic)

    def __rlshift__(self, y: Any, is_arithmetic: bool = True) -> Tensor:
        return OPS["bitwise_left_shift"](y, self, is_arithmetic)

    def __rshift__(self, y: Any, is_arithmetic: bool = True) -> Tensor:
        return OPS["bitwise_right_shift"](self, y, is_arithmetic)

    def __rrshift__(self, y: Any, is_arithmetic: bool = True) -> Tensor:
        return OPS["bitwise_right_shift"](y, self, is_arithmetic)

    def __floordiv__(self, y: Any) -> Tensor:
        return ar.floor_divide(self, y)

    def __rfloordiv__(self, y: Any) -> Tensor:
        return ar.floor_divide(y, self)

    def __mod__(self, y: Any) -> Tensor:
        return ar.remainder(self, y)

    def __rmod__(self, y: Any) -> Tensor:
        return ar.remainder(y, self)

    def __pow__(self, y: Any) -> Tensor:
        return ar.pow(self, y)

    def __rpow__(self, y: Any) -> Tensor:
        return ar.pow(y, self)

    def __matmul__(self, y: Any) -> Tensor:
        return ar.matmul(self, y)

    def __rmatmul__(self, y: Any) -> Tensor:
        return ar.matmul(y, self)

    def __neg__(self) -> Tensor:
        return ar.neg(self)

    def __pos__(self) -> Tensor:
        return self

    def __abs__(self) -> Tensor:
        return self.abs()

    def __invert__(self) -> Tensor:
        return ar.bitwise_not(self)

    def __and__(self, y: Any) -> Tensor:
        return ar.bitwise_and(self, y)

    def __rand__(self, y: Any) -> Tensor:
        return ar.bitwise_and(y, self)

    def __or__(self, y: Any) -> Tensor:
        return ar.bitwise_or(self, y)

    def __ror__(self, y: Any) -> Tensor:
        return ar.bitwise_or(y, self)

    def __xor__(self, y: Any) -> Tensor:
        return ar.bitwise_xor(self, y)

    def __rxor__(self, y: Any) -> Tensor:
        return ar.bitwise_xor(y, self)

    def __eq__(self, y: Any) -> Any:
        return NotImplemented if y is None else ar.equal(self, y)

    def __ne__(self, y: Any) -> Any:
        return NotImplemented if y is None else ar.not_equal(self, y)

    def __lt__(self, y: Any) -> Tensor:
        return ar.less_than(self, y)

    def __le__(self, y: Any) -> Tensor:
        return ar.less_equal(self, y)

    def __gt__(self, y: Any) -> Tensor:
        return ar.greater_than(self, y)

    def __ge__(self, y: Any) -> Tensor:
        return ar.greater_equal(self, y)

    @property
    def T(self) -> Tensor:
        """Dims in reverse order."""
        return self.transpose(list(range(self.ndim))[::-1])

    @property
    def mT(self) -> Tensor:
        """The last two dims swapped."""
        if self.ndim < 2:
            raise ShapeError(f"mT needs at least 2 dims, got shape {list(self.shape)}")
        return self.transpose([*range(self.ndim - 2), self.ndim - 1, self.ndim - 2])


class _Data(Tensor):
    """x.data: reads and writes the array of x itself."""

    def __init__(self, owner: Tensor) -> None:
        self._owner = owner
        TensorState.__init__(self, owner._array)

    @property
    def _array(self) -> Any:
        return self._owner._array

    @_array.setter
    def _array(self, value: Any) -> None:
        if value is not self._owner._array:
            self._owner._array = value
            self._owner.__dict__["_version"] = self._owner.inplace_version + 1

    def lasting_ref(self) -> Callable[[], Tensor | None]:
        """What gives it for good: x.data[0] outlives x.data."""
        return lambda: self

    def __deepcopy__(self, memo: dict[Any, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


class HookHandle:
    """Handle of a registered hook; remove() unregisters it."""

    def __init__(self, remove: Callable[[], bool]) -> None:
        self._remove = remove

    def remove(self) -> bool:
        """Take the hook away; False if it was gone already."""
        return self._remove()


def _wrap(array: Any) -> Tensor:
    tensor: Tensor = _new(Tensor)
    tensor._array = array
    tensor.stop_gradient = True
    tensor._node = None
    tensor._index = 0
    tensor._grad = None
    if (watching := _watch.active) is not None:
        watching.created(tensor)
    return tensor


tape.factory.cls, tape.factory.tensor, tape.factory.add = Tensor, _wrap, ar.add
_copy_kernel = tape.Kernel(
    lambda x: x + jnp.zeros((), x.dtype) if dtypes.is_inexact(x.dtype) else jnp.array(x), "clone"
)


@recorded
def _with_item(x: Tensor, index: Any, value: Any) -> Tensor:
    """A copy of x with x[index] = value."""
    changed = _copy(x)
    changed[index] = value
    return changed


@recorded
def _copy(x: Tensor) -> Tensor:
    return _same_value(x, tape.apply(_copy_kernel, (state.read(x),), (tape.edge_of(x),)))


def _same_value(x: Tensor, made: Tensor) -> Tensor:
    """made, a copy of x, of which whoever watches is told: no op made it."""
    if (watcher := state.code_watcher()) is not None:
        watcher.copied(x, made)
    return made


def to_tensor(data: Any, dtype: Any = None, place: Any = None, stop_gradient: bool = True) -> Tensor:
    """A Tensor with a copy of data: a number, an ndarray, a Tensor, or nested lists of these.

    Python floats get the default dtype, integers int64, complex numbers complex64; an ndarray keeps its dtype. Of
    Tensors in lists that a capture or a Program computes, the result is computed there too.

    >>> to_tensor([[1, 2], [3, 4]]).dtype.name
    'int64'
    """
    if _is_computed(data):
        joined = _as_one_tensor(data).detach()
        joined = joined if dtype is None else joined.astype(dtype)
        joined.stop_gradient = stop_gradient
        return joined
    return Tensor(as_array(data, dtype, place), stop_gradient=stop_gradient)


def _is_computed(data: Any) -> bool:
    """Whether the value of a Variable, or of a traced Tensor in lists, is part of data."""
    if isinstance(data, (list, tuple)):
        return any(_is_computed(d) or (isinstance(d, Tensor) and isinstance(d._array, state.Tracer)) for d in data)
    return isinstance(data, Tensor) and isinstance(data._array, Symbol)


def _with_lists_joined(index: Any) -> Any:
    """An index with a Tensor for each list of Tensors, whose values need not be known for that."""
    if isinstance(index, tuple):
        return tuple(_with_lists_joined(i) if isinstance(i, list) else i for i in index)
    return to_tensor(index) if isinstance(index, list) and _is_computed(index) else index


def _as_one_tensor(data: Any) -> Tensor:
    if isinstance(data, (list, tuple)):
        return manipulation.stack([_as_one_tensor(d) for d in data])
    return data if isinstance(data, Tensor) else Tensor(as_array(data, None, None))


def destination(args: Iterable[Any], device: Any, dtype: Any) -> tuple[Any, Any]:
    """(device, dtype) that the arguments of a `to` say, in any order: names, Places, dtypes, Tensors to be like."""
    for arg in args:
        if isinstance(arg, Tensor):
            device, dtype = arg.place, arg.dtype
        elif isinstance(arg, bool):
            continue
        elif isinstance(arg, (places.Place, jax.Device)) or (isinstance(arg, str) and _names_device(arg)):
            device = arg
        elif arg is not None:
            dtype = arg
    return device, dtype


def _names_device(text: str) -> bool:
    return text.split(":")[0] not in dtypes.NAMES and text not in ("float", "double", "half", "int", "long")


@recorded
def _fill(x: Tensor, value: float) -> Tensor:
    return creation.full_like(x, value)


@recorded
def _move(x: Tensor, place: places.Place) -> Tensor:
    device = place.device()
    return _same_value(x, tape.apply(_move_kernel(device), (state.read(x),), (tape.edge_of(x),)))


_movers: dict[Any, tape.Kernel] = {}


def _move_kernel(device: Any) -> tape.Kernel:
    if device not in _movers:
        kernel = tape.Kernel(lambda x: jax.device_put(x, device), "to")
        kernel.forward = lambda x: put(x, device)  # a copy between devices is no compiled program
        _movers[device] = kernel
    return _movers[device]
