"""Program: recorded code as data, in blocks of operations over named values.

Floor: 4.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state, unique_name
from polyreme.core.symbol import DYNAMIC, Symbol
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, ProgramError, did_you_mean
from polyreme.program import drawing, serial
from polyreme.program.operation import Backward, Call, Operation, Optimize
from polyreme.program.values import refs

_identities = itertools.count()
_SHOWN = 8  # elements of a constant that a listing writes out


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

    @property
    def type(self) -> str:
        """What kind of value it stands for: always "lod_tensor", dense numbers."""
        return "lod_tensor"

    @property
    def grad_name(self) -> str:
        """The name of its gradient."""
        return f"{self.name}@GRAD"


class Block:
    """Operations in order, and the Variables they define.

    takes: names bound anew each time the block runs (what a loop carries); gives: its results, Refs or constants.
    """

    def __init__(self, program: Program, index: int, parent: Block | None) -> None:
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
        known, found = set(self.takes), {}
        for op in self.ops:
            found.update(dict.fromkeys(n for n in op.reads() if n not in known))
            known.update(op.outputs)
        found.update(dict.fromkeys(n for n in refs(self.gives) if n not in known))
        return list(found)

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
    ) -> Variable:
        """A new Variable; ProgramError if the name is taken here."""
        name = name or unique_name.generate("tmp")
        if name in self.vars:
            raise ProgramError(f"the Program already has a variable {name!r}; names are unique in a block")
        sizes = tuple(DYNAMIC if s is None else int(s) for s in shape)
        made = Variable.__new__(Variable)
        symbol = Symbol(name, sizes, dtypes.as_dtype(dtype or dtypes.default_dtype()), weak_type, known, probed)
        Tensor.__init__(made, symbol, stop_gradient=stop_gradient)
        made.name, made.persistable, made.block = name, persistable, self
        self.vars[name] = made
        self.program.changed()
        return made

    def all_parameters(self) -> list[Tensor]:
        """The trainable and frozen parameters declared here."""
        return [v for v in self.vars.values() if v.persistable and not isinstance(v, Variable)]

    def append(self, op: Operation) -> None:
        """Add an operation at the end."""
        self.ops.append(op)
        self.program.changed()


class Program:
    """Recorded operations, in nested blocks, and the values they were recorded with.

    random_seed: 0 draws random numbers from the default generator, anything else from a stream of this seed that each
    scope keeps. held: Tensors with values that were used while recording: shared with whoever made them.
    made_elsewhere: it came from a file, so its names were counted in another process.
    """

    def __init__(self) -> None:
        self._id = next(_identities)
        self.version = 0
        self.blocks: list[Block] = [Block(self, 0, None)]
        self.held: dict[str, Tensor] = {}
        self._seed = 0
        self.is_test = False
        self.made_elsewhere = False

    @property
    def random_seed(self) -> int:
        return self._seed

    @random_seed.setter
    def random_seed(self, seed: int) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError(f"Program.random_seed is an integer of at least 0, got {seed!r}")
        self._seed = seed
        self.changed()

    def changed(self) -> None:
        """Count a change: what was compiled before is for the Program as it was."""
        self.version += 1

    @property
    def identity(self) -> tuple[int, int]:
        """Which Program this is, in which version."""
        return (self._id, self.version)

    # looking

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_ops(self) -> int:
        return sum(len(block.ops) for block in self.blocks)

    def global_block(self) -> Block:
        """The outermost block."""
        return self.blocks[0]

    def block(self, index: int) -> Block:
        """A block by its index."""
        return self.blocks[index]

    def current_block(self) -> Block:
        """The block that operations are recorded into: the outermost one unless code of a branch or loop runs."""
        return next((b for b in reversed(defaults.inside) if b.program is self), self.global_block())

    def list_vars(self) -> Iterator[Tensor]:
        """Every Variable and parameter, outer blocks first."""
        return (v for block in self.blocks for v in block.vars.values())

    def all_parameters(self) -> list[Tensor]:
        """Every parameter."""
        return [p for block in self.blocks for p in block.all_parameters()]

    def add_block(self, parent: Block) -> Block:
        """A new block inside another."""
        self.blocks.append(Block(self, len(self.blocks), parent))
        return self.blocks[-1]

    def every_op(self) -> Iterator[Operation]:
        """All operations, those of inner blocks included."""
        return (op for block in self.blocks for op in block.ops)

    # copying

    def clone(self, for_test: bool = False) -> Program:
        """A copy that later changes to this one do not reach.

        for_test: without backward and update, and with dropout, normalization and the like as in evaluation.
        """
        return self.rewritten(_as_in_evaluation) if for_test else self.rewritten(list)

    def rewritten(self, change: Callable[[list[Operation]], list[Operation]]) -> Self:
        """A copy in which each block's operations are what change makes of them."""
        copied = type(self)()
        copied._seed, copied.held = self._seed, dict(self.held)
        copied.is_test = self.is_test or change is _as_in_evaluation
        copied.made_elsewhere = self.made_elsewhere
        copied.blocks = [Block(copied, b.idx, None) for b in self.blocks]
        new = {id(b): c for b, c in zip(self.blocks, copied.blocks, strict=True)}
        for old, block in zip(self.blocks, copied.blocks, strict=True):
            block.parent = None if old.parent is None else new[id(old.parent)]
            block.takes, block.gives = list(old.takes), list(old.gives)
            block.ops = [_with_blocks(op, new) for op in change(list(old.ops))]
            block.vars = {name: copy_var(v, block) for name, v in old.vars.items()}
            for v in block.vars.values():
                if isinstance(v, Variable) and v.lod:
                    v.lod = tuple(block.var(level.name) for level in v.lod)  # type: ignore[misc]
        copied.changed()
        return copied

    # files

    def to_json(self, arrays: dict[str, Any] | None = None) -> str:
        """The Program as JSON: its operations by the names ops are declared under, with the values it holds.

        arrays: a dict that takes constants and held values by name, to be kept beside the JSON (in safetensors); None
        writes them into it. Raises ProgramError for what no file can hold, such as a Python function.
        """
        return serial.to_json(self, arrays)

    @classmethod
    def from_json(cls, text: str, arrays: Mapping[str, Any] | None = None) -> Self:
        """The Program of what to_json gave. Raises CheckpointError for text that is malformed, changed, of a later
        format, or names classes that are not declared here, ProgramError for ops that are not.
        """
        made = cls()
        serial.fill(made, serial.parse(text), {} if arrays is None else arrays)
        return made

    def serialize_to_string(self) -> bytes:
        """The Program and the values it holds, as bytes."""
        return serial.to_bytes(self)

    @classmethod
    def parse_from_string(cls, binary_str: bytes) -> Self:
        """The Program of what serialize_to_string gave; raises CheckpointError."""
        made = cls()
        serial.read_bytes(made, binary_str, "Program.parse_from_string")
        return made

    def to_string(self, throw_on_error: bool = False, with_details: bool = False) -> str:
        """A listing. with_details: variables too."""
        return listing(self, with_details)

    def __str__(self) -> str:
        return listing(self, False)

    def draw(self, path: str | Path) -> None:
        """Write a picture, see static.draw."""
        drawing.draw(self, path)


def copy_var(var: Tensor, block: Block) -> Tensor:
    """A Variable or parameter like var, of another block."""
    copied: Any = type(var).__new__(type(var))
    Tensor.__init__(copied, var._array, stop_gradient=var.stop_gradient)
    copied._node = var._node
    copied.__dict__.update(var.__dict__)
    if isinstance(var, Variable):
        copied.block = block
    return copied


def _with_blocks(op: Operation, new: dict[int, Block]) -> Operation:
    """op with the copies of the blocks it runs."""
    if not op.blocks:
        return op
    changed: dict[str, Any] = {k: new[id(v)] for k, v in vars(op).items() if isinstance(v, Block)}
    return replace(op, **changed)


def _as_in_evaluation(ops: list[Operation]) -> list[Operation]:
    """ops without backward, updates and what follows from them."""
    gone: set[str] = set()
    kept = []
    for op in ops:
        if isinstance(op, (Backward, Optimize)) or not gone.isdisjoint(op.reads()):
            gone |= {*op.outputs, *op.writes()}
        else:
            kept.append(op)
    for_rates = _behind_rates(kept, {op.rate for op in ops if isinstance(op, Optimize) and op.rate is not None})
    return [_evaluated(op) for op in kept if id(op) not in for_rates]


def _behind_rates(ops: list[Operation], wanted: set[str]) -> set[int]:
    """ids of the operations that only serve to compute learning rates: their counters stand still in evaluation."""
    found, used = set[int](), set[str]()
    for op in reversed(ops):
        gives = {*op.outputs, *op.writes()}
        if gives and gives <= wanted - used:
            found.add(id(op))
            wanted |= set(op.reads())
        else:
            used |= set(op.reads())
    return found


def _evaluated(op: Operation) -> Operation:
    if not isinstance(op, Call):
        return op
    call = op.with_argument("training", False)
    return call if call is op else _without_changes(call)


def _without_changes(call: Call) -> Call:
    call.changes = []
    return call


def listing(program: Program, with_details: bool) -> str:
    """A Program as text: a line for each operation, results on the left."""
    lines: list[str] = []
    for block in program.blocks:
        head = "program" if block.parent is None else f"block {block.idx} (in block {block.parent.idx})"
        takes = f" takes {', '.join('%' + n for n in block.takes)}" if block.takes else ""
        lines.append(f"{head}{takes} {{")
        if with_details:
            lines += [f"  var {_described(v)}" for v in block.vars.values()]
        lines += [f"  {line(op, block)}" for op in block.ops]
        if block.gives:
            lines.append(f"  give {', '.join(map(repr, block.gives))}")
        lines.append("}")
    return "\n".join(lines)


def _described(var: Tensor) -> str:
    kind = (
        " parameter" if var.persistable and not isinstance(var, Variable) else " persistable" if var.persistable else ""
    )
    return f"{var._array!r}{kind}{', stop_gradient' if var.stop_gradient else ''}"


def line(op: Operation, block: Block) -> str:
    """One operation as text."""
    shown = []
    for name in op.outputs:
        var = block.vars.get(name)
        shown.append(f"%{name}" + (f": {var.dtype.name}{var.shape}" if var is not None else ""))
    left = f"{', '.join(shown)} = " if shown else ""
    return f"{left}{_right(op)}"


def _right(op: Operation) -> str:
    if isinstance(op, Call):
        given = [*map(_text, op.args), *(f"{k}={_text(v)}" for k, v in op.kwargs.items())]
        note = "".join(
            [
                f"  writes {', '.join('%' + n for n in op.changes)}" if op.changes else "",
                f"  autocast {op.policy.level} {op.policy.low}" if op.policy is not None else "",
                "" if op.taped else "  no_grad",
            ]
        )
        return f"{op.name}({', '.join(given)}){note}"
    reads = ", ".join(f"%{n}" for n in op.reads())
    blocks = f" blocks {', '.join(str(b.idx) for b in op.blocks)}" if op.blocks else ""
    writes = f"  writes {', '.join('%' + n for n in op.writes())}" if op.writes() else ""
    return f"{op.kind}({reads}){blocks}{writes}"


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        shown = np.array2string(value, separator=", ", threshold=_SHOWN).replace("\n", "")
        return f"{value.dtype.name}{list(value.shape)} {' '.join(shown.split())}"
    return repr(value)


class _Defaults:
    """The Programs code is recorded into."""

    def __init__(self) -> None:
        self.main = Program()
        self.startup = Program()
        self.scopes: list[str] = []
        self.inside: list[Block] = []

    @property
    def block(self) -> Block:
        """Where the next operation goes."""
        return self.inside[-1] if self.inside else self.main.global_block()


defaults = _Defaults()


def default_main_program() -> Program:
    """The Program that ops are recorded into."""
    return defaults.main


def default_startup_program() -> Program:
    """The Program that parameter initializers are recorded into."""
    return defaults.startup


@contextmanager
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Record into these Programs inside the block; startup_program None keeps the present one."""
    for what, program in (("main_program", main_program), ("startup_program", startup_program)):
        if not isinstance(program, Program) and not (what == "startup_program" and program is None):
            raise TypeError(f"program_guard: {what} is a Program, got {type(program).__name__}")
    for program in (main_program, startup_program):
        if program is not None and program.made_elsewhere:
            unique_name.reserve(v.name for v in program.list_vars())
            unique_name.reserve(op.key for op in program.every_op() if isinstance(op, Optimize))
    outer = defaults.main, defaults.startup, defaults.inside
    defaults.main, defaults.inside = main_program, []
    if startup_program is not None:
        defaults.startup = startup_program
    try:
        yield
    finally:
        defaults.main, defaults.startup, defaults.inside = outer


@contextmanager
def name_scope(prefix: str | None = None) -> Iterator[None]:
    """Put prefix into the `scope` of operations recorded inside the block; names of variables stay."""
    defaults.scopes.append(prefix or "")
    try:
        yield
    finally:
        defaults.scopes.pop()


@contextmanager
def inside(block: Block) -> Iterator[Block]:
    """Record into an inner block."""
    defaults.inside.append(block)
    try:
        yield block
    finally:
        defaults.inside.pop()
