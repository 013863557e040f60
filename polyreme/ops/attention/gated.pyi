"""For type checkers: polyreme.ops.attention.gated. Written by tools/write_stubs.py."""

from polyreme.core.annotations import TensorLike
from polyreme.eager.tensor import Tensor

def fused_gate_attention(query: TensorLike, key: TensorLike | None = None, query_weight: TensorLike | None = None, key_weight: TensorLike | None = None, value_weight: TensorLike | None = None, qkv_weight: TensorLike | None = None, gate_linear_weight: TensorLike | None = None, gate_linear_bias: TensorLike | None = None, out_linear_weight: TensorLike | None = None, out_linear_bias: TensorLike | None = None, nonbatched_bias: TensorLike | None = None, attn_mask: TensorLike | None = None, has_gating: bool = True, merge_qkv: bool = True, use_flash_attn: bool = False, name: str | None = None, *, out: Tensor | None = None) -> Tensor: ...
