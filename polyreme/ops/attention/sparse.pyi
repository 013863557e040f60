"""For type checkers: polyreme.ops.attention.sparse. Written by tools/write_stubs.py."""

from polyreme.core.annotations import TensorLike
from polyreme.eager.tensor import Tensor

def sparse_attention(query: TensorLike, key: TensorLike, value: TensorLike, sparse_csr_offset: TensorLike, sparse_csr_columns: TensorLike, key_padding_mask: TensorLike | None = None, attn_mask: TensorLike | None = None, name: str | None = None, *, out: Tensor | None = None) -> Tensor: ...
