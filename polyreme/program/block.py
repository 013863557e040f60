"""Blocks of a Program, and the Variables that are defined in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.core import state, unique_name
from polyreme.core.symbol import DYNAMIC, Symbol
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, ProgramError, did_you_mean
from polyreme.program.operation import Operation
from polyreme.program.values import refs


def _operator(name: str) -> Callable[[Any, Any], Any]:
    """An operator of Tensors, which aligns the batch of fewer dims on the right as the Program's code expects."""
    plain = getattr(Tensor, name)

    @functools.wraps(plain)
    def operator(self: Variable, y: Any) -> Any:
        recorder = state.recorder()
        is_in_1x = recorder is not None and recorder.as_in_1x
        if is_in_1x and isinstance(y, Variable) and 0 < y.ndim < self.ndim and y._array.shape[0] == DYNAMIC:
            y = y.unsqueeze([*range(y.ndim, self.ndim)])
        return plain(self, y)

    return operator


class Variable(Tensor):
    """A Tensor of a static Program: it has a name, a shape (-1 where a size is not known) and a dtype, and no value.

    block: where it was recorded. is_data: it is fed. lod: Variables with the offsets of its sequences, one a level.
    """

    block: Block
    is_data = False
    lod: tuple[Variable, ...] = ()

    @property
    def lod_level(self) -> int:
        """How many levels of sequences its rows are cut into."""
        return len(self.lod)

    @property
    def size(self) -> Any:
        """Number of elements: an integer Variable if a dim is not known."""
        return self.numel() if self._array.is_dynamic and state.recording() else self._array.size

    def __bool__(self) -> bool:
        recorder = state.recorder()
        is_one = self.dtype == dtypes.bool_ or (not self._array.is_dynamic and self._array.size == 1)
        # what could be no condition is asked whether it is there
        return True if recorder is not None and recorder.as_in_1x and not is_one else super().__bool__()

    @property
    def type(self) -> str:
        """What kind of value it stands for: always "lod_tensor", dense numbers."""
        return "lod_tensor"

    __add__, __sub__, __mul__ = _operator("__add__"), _operator("__sub__"), _operator("__mul__")
    __truediv__, __floordiv__ = _operator("__truediv__"), _operator("__floordiv__")
    __mod__, __pow__ = _operator("__mod__"), _operator("__pow__")
    __eq__, __ne__ = _operator("__eq__"), _operator("__ne__")
    __lt__, __le__ = _operator("__lt__"), _operator("__le__")
    __gt__, __ge__ = _operator("__gt__"), _operator("__ge__")
    __hash__ = Tensor.__hash__

    def to_string(self, throw_on_error: bool = True, with_details: bool = False) -> str:
        """Its name, dtype and shape. The two settings change nothing."""
        return repr(self)

    @property
    def grad_name(self) -> str:
        """The name of its gradient."""
        return f"{self.name}@GRAD"


class Block:
    """Operations in order, and the Variables they define.

    takes: names bound anew each time the block runs (what a loop carries); gives: its results, Refs or constants.
    """

    def __init__(self, program: Any, index: int, parent: Block | None) -> None:
        self.program = program
        self.idx = index
        self.parent = parent
        self.vars: dict[str, Tensor] = {}
        self.ops: list[Operation] = []
        self.takes: list[str] = []
        self.gives: list[Any] = []

    def var(self, name: str) -> Tensor:
        """The Variable of this name; ProgramError if the block has none."""
        found = self.find_var(name)
        if found is None:
            names = [n for block in self._lineage() for n in block.vars]
            raise ProgramError(f"the Program has no variable {name!r}{did_you_mean(name, names)}")
        return found

    def find_var(self, name: str) -> Tensor | None:
        """The Variable of this name here or in a block around this one, or None."""
        return next((block.vars[name] for block in self._lineage() if name in block.vars), None)

    def has_var(self, name: str) -> bool:
        """Whether there is a Variable of this name in this very block."""
        return name in self.vars

    def _lineage(self) -> Iterator[Block]:
        block: Block | None = self
        while block is not None:
            yield block
            block = block.parent

    def free(self) -> list[str]:
        """Names it takes from outside, each once."""
        known, names = set(self.takes), {}
        for op in self.ops:
            names.update(dict.fromkeys(n for n in op.reads() if n not in known))
            known.update(op.outputs)
        names.update(dict.fromkeys(n for n in refs(self.gives) if n not in known))
        return list(names)

    def create_var(
        self,
        name: str | None = None,
        shape: Sequence[int | None] = (),
        dtype: Any = None,
        persistable: bool = False,
        stop_gradient: bool = True,
        known: Any = None,
        weak_type: bool = False,
        probed: Any = None,
        lod_level: int | None = None,
        type: Any = None,
    ) -> Variable:
        """A new Variable; ProgramError if the name is taken here.

        type: the kind of value, dense numbers whatever it says. lod_level: 0 or None; sequences come with what is fed
        or computed, so ConfigError is raised for more.
        """
        if lod_level:
            raise ConfigError(
                f"create_var: lod_level={lod_level} for {name!r}; a Variable of sequences is made by data(lod_level=), "
                "or by the layer that gives it"
            )
        name = name or unique_name.generate("tmp")
        if name in self.vars:
            raise ProgramError(f"the Program already has a variable {name!r}; names are unique in a block")
        sizes = tuple(DYNAMIC if s is None else int(s) for s in shape)
        variable = Variable.__new__(Variable)
        symbol = Symbol(name, sizes, dtypes.as_dtype(dtype or dtypes.default_dtype()), weak_type, known, probed)
        Tensor.__init__(variable, symbol, stop_gradient=stop_gradient)
        variable.name, variable.persistable, variable.block = name, persistable, self
        self.vars[name] = variable
        self.program.changed()
        return variable

    def all_parameters(self) -> list[Tensor]:
        """The trainable and frozen parameters declared here."""
        return [v for v in self.vars.values() if v.persistable and not isinstance(v, Variable)]

    def append(self, op: Operation) -> None:
        """Add an operation at the end."""
        self.ops.append(op)
        self.program.changed()


def copy_var(var: Tensor, block: Block) -> Tensor:
    """A Variable or parameter like var, of another block."""
    copied: Any = type(var).__new__(type(var))
    Tensor.__init__(copied, var._array, stop_gradient=var.stop_gradient)
    copied._node = var._node
    copied.__dict__.update(var.__dict__)
    if isinstance(var, Variable):
        copied.block = block
    return copied
