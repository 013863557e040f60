"""GGUF files: one file of metadata, tokenizer and weights, often of few bits. Read with the `gguf` library.

Their layout differs from a folder's in names, and for a LLaMA in the order of the rows of queries' and keys' weights:
pairs that are turned together are neighbours there, and lie half a head apart in a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.errors import CheckpointError, ConfigError
from polyreme.models.published import Changed, Index, WeightSource

_MAGIC = b"GGUF"
_DECODED = np.dtype("float32")
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def is_gguf(path: Path) -> bool:
    """Whether a file begins as these do."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == _MAGIC
    except OSError:
        return False


def open_gguf(path: Path) -> tuple[dict[str, Any], dict[str, WeightSource]]:
    """(what config.json of the same model says, its weights under the names of a folder, float32).

    A weight is decoded when it is read. Raises ConfigError without the library, for an architecture that cannot be had
    here and for rotary positions in another way, CheckpointError for a damaged file.
    """
    gguf = _library()
    reader = _reader(gguf, path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.ggml.")}
    kind = fields.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise ConfigError(f"{path}: architecture {kind!r}; of GGUF files {', '.join(_ARCHITECTURES)} can be had here")
    config: dict[str, Any] = {"architectures": [_ARCHITECTURES[kind]], "model_type": kind}
    for key, name in _KEYS.items():
        if f"{kind}.{key}" in fields:
            config[name] = fields[f"{kind}.{key}"]
    scaling = fields.get(f"{kind}.rope.scaling.type")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if scaling not in (None, "none") or "rope_freqs.weight" in tensors:
        raise ConfigError(
            f"{path}: its rotary positions are stretched ({scaling or 'rope_freqs'}), which is not read from GGUF "
            "files; use the folder that it was made of"
        )
    config["vocab_size"] = int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else 0
    config["tie_word_embeddings"] = "output.weight" not in tensors
    heads = config.get("num_attention_heads", 0)
    groups = {"attn_q": heads, "attn_k": config.get("num_key_value_heads", heads)} if kind == "llama" else {}
    return config, {_name(path, name): _source(gguf, tensor, groups) for name, tensor in tensors.items()}


def gguf_fields(path: Path, prefix: str) -> dict[str, Any]:
    """Values of the metadata whose names begin so."""
    reader = _reader(_library(), path)
    return {name: field.contents() for name, field in reader.fields.items() if name.startswith(prefix)}


def _library() -> Any:
    try:
        return import_module("gguf")
    except ImportError:
        raise ConfigError("GGUF files are read with the gguf library: pip install polyreme[convert]") from None


def _reader(gguf: Any, path: Path) -> Any:
    try:
        return gguf.GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
        raise CheckpointError(f"{path}: a damaged GGUF file ({error})") from None


def _name(path: Path, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    _, number, part = [*stem.split(".", 2), "", ""][:3]
    if not stem.startswith("blk.") or part not in _INNER:
        raise CheckpointError(f"{path}: unknown weight {name!r}")
    return f"model.layers.{number}.{_INNER[part]}.{kind}"


@dataclass(frozen=True)
class _Encoded:
    """A tensor of a GGUF file; decoded whole, as its blocks are not those of a device's part."""

    decode: Callable[[], np.ndarray]
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, index: Index) -> np.ndarray:
        return self.decode()[index]


def _source(gguf: Any, tensor: Any, groups: Mapping[str, int]) -> WeightSource:
    shape = tuple(int(n) for n in tensor.shape[::-1])
    encoded = _Encoded(lambda: gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape), shape, _DECODED)
    part = tensor.name.split(".")[-2]
    if part not in groups:
        return encoded
    return Changed(shape, encoded.dtype, lambda index: _by_halves(encoded.read((slice(None),)), groups[part])[index])


def _by_halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head, there pairs of neighbours, as a folder has them: pairs half a head apart."""
    return array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
