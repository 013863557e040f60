"""Program: recorded code as data, in blocks of operations over named values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from polyreme.core import unique_name
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError
from polyreme.io.serialization import FileKind, register_file_kind
from polyreme.program import drawing, serial, stored
from polyreme.program.block import Block, Variable, copy_var
from polyreme.program.evaluation import as_in_evaluation
from polyreme.program.listing import listing
from polyreme.program.operation import Operation
from polyreme.program.scope import Scope, global_scope

_identities = itertools.count()


class Program:
    """Recorded operations, in nested blocks, and the values they were recorded with.

    random_seed: 0 draws random numbers from the default generator, anything else from a stream of this seed that each
    scope keeps. captured: Tensors with values that were used while recording: shared with whoever made them.
    made_elsewhere: it came from a file, so its names were counted in another process. is_startup: initial values are
    recorded into it, of which there may be none.
    """

    def __init__(self) -> None:
        self._id = next(_identities)
        self.version: int = 0
        self.blocks: list[Block] = [Block(self, 0, None)]
        self.captured: dict[str, Tensor] = {}
        self.entered: list[Block] = []  # inner blocks that are being recorded
        self._seed = 0
        self.is_test = False
        self.unused_feeds: set[str] = set()
        """Names that runs were fed in vain, and said so."""
        self.made_elsewhere = self.is_startup = False

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

    def hold(self, tensor: Tensor) -> str:
        """The name under which the Program has a Tensor with a value, which it shares from now on."""
        name = next((n for n, held in self.captured.items() if held is tensor), None)
        if name is None:
            name = getattr(tensor, "_name", None)
            if name is None or name in self.captured:
                name = unique_name.generate("held")
            self.captured[name] = tensor
            self.changed()
        return name

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
        return self.entered[-1] if self.entered else self.global_block()

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

    # values

    def state_dict(self, mode: str = "all", scope: Scope | None = None) -> dict[str, Tensor]:
        """Values by name in a scope: "param" those that outlive a run, "opt" those of optimizers, "all" both.

        Copies. scope: None for the one in force. Raises ConfigError for another mode, ProgramError for a variable
        without a value.
        """
        if mode not in ("all", "param", "opt"):
            raise ConfigError(f"Program.state_dict: mode={mode!r}; give 'all', 'param' or 'opt'")
        scope = global_scope() if scope is None else scope
        arrays: dict[str, Any] = {}
        if mode != "opt":
            arrays |= stored.values_of(self, scope, stored.persistables(self))
        if mode != "param":
            arrays |= stored.training_state(self, scope)[0]
        return {name: to_tensor(array) for name, array in arrays.items()}

    def set_state_dict(self, state_dict: Mapping[str, Any], scope: Scope | None = None) -> list[str]:
        """Give variables values by name, in a scope; returns the names that were of no use.

        What state_dict does not have stays as it is. Raises CheckpointError for a shape or dtype that does not fit,
        ProgramError if no name fits.
        """
        return stored.set_state(self, global_scope() if scope is None else scope, state_dict, "Program.set_state_dict")

    # copying

    def clone(self, for_test: bool = False) -> Program:
        """A copy that later changes to this one do not reach.

        for_test: without backward and update, and with dropout, normalization and the like as in evaluation.
        """
        return self.rewritten(as_in_evaluation) if for_test else self.rewritten(list)

    def rewritten(self, change: Callable[[list[Operation]], list[Operation]]) -> Self:
        """A copy in which each block's operations are what change makes of them."""
        copied = type(self)()
        copied._seed, copied.captured = self._seed, dict(self.captured)
        copied.is_test = self.is_test or change is as_in_evaluation
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


def _with_blocks(op: Operation, new: dict[int, Block]) -> Operation:
    """op with the copies of the blocks it runs."""
    if not op.blocks:
        return op
    changed: dict[str, Any] = {k: new[id(v)] for k, v in vars(op).items() if isinstance(v, Block)}
    return replace(op, **changed)


register_file_kind(serial.FORMAT, FileKind(Program, Program.serialize_to_string, Program.parse_from_string))
