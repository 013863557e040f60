"""The pool of a cache's blocks: which are in use, by how many sequences, and which hold the beginning of a known
prompt."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from polyreme.generation.prompt_vectors import PromptVectors


class BlockPool:
    """Numbers of `num_blocks` blocks, counted by use.

    A block that nobody uses any more but whose content has a key is left as it is until all others are in use; then the
    one that was used longest ago goes first.

    >>> pool = BlockPool(2)
    >>> block = pool.take()
    >>> pool.name(block, b"key")
    >>> pool.give_back([block])
    >>> pool.share([b"key"]) == [block], pool.num_available
    (True, 1)
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # used by nobody, with a key; the next to go first
        self._uses = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that a sequence uses."""
        return self.num_blocks - self.num_available

    def take(self) -> int:
        """A block that nobody uses, of which there must be one; what it held is forgotten."""
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._uses[block] = 1
        return block

    def share(self, keys: Sequence[bytes]) -> list[int] | None:
        """The blocks whose contents have these keys, for one user more; None if one is not there."""
        blocks = [self._block_of.get(key) for key in keys]
        if any(block is None for block in blocks):
            return None
        shared = [block for block in blocks if block is not None]
        self.hold(shared)
        return shared

    def hold(self, blocks: Sequence[int]) -> None:
        """One user more of each."""
        for block in blocks:
            self._uses[block] += 1
            self._idle.pop(block, None)

    def name(self, block: int, key: bytes) -> None:
        """Say what a block that is in use holds; of two that hold the same the first is kept."""
        if key not in self._block_of:
            self._block_of[key], self._key_of[block] = block, key

    def forget(self) -> None:
        """Take the keys of all blocks away."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._key_of.clear()
        self._block_of.clear()

    def give_back(self, blocks: Sequence[int]) -> None:
        """One user less of each; of a sequence's blocks the last are the first to go."""
        for block in reversed(blocks):
            self._uses[block] -= 1
            if self._uses[block]:
                continue
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)


def block_keys(
    tokens: Sequence[int], block_size: int, writer: str = "", vectors: PromptVectors | None = None
) -> list[bytes]:
    """A key of each full block of tokens, by its tokens, by all before them, by who computes what they hold, and by
    what stands in their place.

    >>> block_keys([1, 2, 3, 4], 2)[0] == block_keys([1, 2, 5], 2)[0], len(block_keys([1, 2, 5], 2))
    (True, 1)
    >>> block_keys([1, 2], 2) == block_keys([1, 2], 2, "an adapter")
    False
    """
    ids, keys = np.asarray(tokens, np.int64), []
    key = hashlib.blake2b(writer.encode(), digest_size=16).digest()
    for start in range(0, len(ids) - block_size + 1, block_size):
        # 128 bits, and not Python's hash: nobody can make a prompt whose key is another's
        seen = b"" if vectors is None else vectors.part(start, start + block_size).digest
        key = hashlib.blake2b(key + ids[start : start + block_size].tobytes() + seen, digest_size=16).digest()
        keys.append(key)
    return keys
