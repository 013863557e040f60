"""GGUF files: one file of metadata, tokenizer and weights, often of few bits. The `gguf` library decodes weights.

Their layout differs from a folder's in names, and for a LLaMA in the order of the rows of queries' and keys' weights:
pairs that are turned together are neighbours there, and lie half a head apart in a folder.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyreme.errors import CheckpointError, ConfigError
from polyreme.models.published import Changed, Index, WeightSource

_MAGIC = b"GGUF"
_DECODED = np.dtype("float32")
_NUMBERS = dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))) | {10: "<u8", 11: "<i8", 12: "<f8"}
"""How numbers of the metadata are stored, by the kind that a file names."""
_TEXT, _ARRAY = 8, 9
_MOST_BYTES = 1 << 30
_ROWS = 256
"""In which a tensor is decoded: a few groups of 16, each small enough for a cache of the processor."""
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Models by the word that a file has for their kind."""
KEYS = {
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
"""Metadata behind the kind's name, and what config.json calls it. Below, names of weights likewise."""
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
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
    gguf, (fields, tensors) = gguf_library(), _read_header(path)
    kind = fields.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ConfigError(f"{path}: architecture {kind!r}; of GGUF files {', '.join(ARCHITECTURES)} can be had here")
    config: dict[str, Any] = {"architectures": [ARCHITECTURES[kind]], "model_type": kind}
    for key, name in KEYS.items():
        if f"{kind}.{key}" in fields:
            config[name] = fields[f"{kind}.{key}"]
    scaling = fields.get(f"{kind}.rope.scaling.type")
    if scaling not in (None, "none") or "rope_freqs.weight" in tensors:
        raise ConfigError(
            f"{path}: its rotary positions are stretched ({scaling or 'rope_freqs'}), which is not read from GGUF "
            "files; use the folder that it was made of"
        )
    config["vocab_size"] = tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 0
    config["tie_word_embeddings"] = "output.weight" not in tensors
    heads = config.get("num_attention_heads", 0)
    groups = {"attn_q": heads, "attn_k": config.get("num_key_value_heads", heads)} if kind == "llama" else {}
    return config, {_name(path, name): _source(gguf, path, tensor, groups) for name, tensor in tensors.items()}


def gguf_fields(path: Path, prefix: str) -> dict[str, Any]:
    """Values of the metadata whose names begin so."""
    return {name: value for name, value in _read_header(path)[0].items() if name.startswith(prefix)}


def gguf_library() -> Any:
    """The gguf module. Raises ConfigError where it is not installed."""
    try:
        return import_module("gguf")
    except ImportError:
        raise ConfigError("GGUF files need the gguf library: pip install polyreme[convert]") from None


class _Entry(NamedTuple):
    """A tensor of a file: its name, its shape, the number of its encoding and where it begins in the file, bytes."""

    name: str
    shape: tuple[int, ...]
    encoding: int
    begin: int


class _Header:
    """What stands before the weights, read in order. Source: the GGUF specification, versions 2 and 3."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self) -> tuple[dict[str, Any], dict[str, _Entry]]:
        """(metadata, tensors by name)."""
        self._bytes(len(_MAGIC))
        version = self._number("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version}; 2 and 3 are read, in little-endian order")
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        fields = {self._text(): self._value(self._number("<I")) for _ in range(num_fields)}
        entries = [self._entry() for _ in range(num_tensors)]
        align = fields.get("general.alignment", 32)
        first = -(-self._file.tell() // align) * align
        return fields, {entry.name: entry._replace(begin=first + entry.begin) for entry in entries}

    def _entry(self) -> _Entry:
        name = self._text()
        shape = [self._number("<Q") for _ in range(self._number("<I"))]
        return _Entry(name, tuple(shape[::-1]), self._number("<I"), self._number("<Q"))

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0]
        kind, count = self._number("<I"), self._number("<Q")
        if kind == _TEXT:
            return [self._text() for _ in range(count)]
        if kind == _ARRAY:
            raise ValueError("an array of arrays among the metadata")
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        form = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._bytes(count * form.itemsize), form).tolist()

    def _text(self) -> str:
        return self._bytes(self._number("<Q")).decode("utf-8")

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _bytes(self, count: int) -> bytes:
        # memory is taken for what the file has, not for what it says
        read = self._file.read(min(count, _MOST_BYTES))
        if len(read) != count:
            raise ValueError(f"it ends early, or a length is wrong: {count} bytes asked for, {len(read)} there")
        return read


def _read_header(path: Path) -> tuple[Mapping[str, Any], Mapping[str, _Entry]]:
    try:
        stat = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    return _header_of(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=2)  # model and tokenizer read it, which has a hundred thousand texts
def _header_of(path: Path, changed: int, nbytes: int) -> tuple[Mapping[str, Any], Mapping[str, _Entry]]:
    try:
        with open(path, "rb") as file:
            return _Header(file).read()
    except (ValueError, KeyError, OverflowError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path}: a damaged GGUF file ({error})") from None


def _name(path: Path, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    _, number, part = [*stem.split(".", 2), "", ""][:3]
    if not stem.startswith("blk.") or part not in INNER:
        raise CheckpointError(f"{path}: unknown weight {name!r}")
    return f"model.layers.{number}.{INNER[part]}.{kind}"


@dataclass(frozen=True)
class _Encoded:
    """A tensor of a GGUF file; decoded whole, as its blocks are not those of a device's part."""

    decode: Callable[[], np.ndarray]
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, index: Index) -> np.ndarray:
        return self.decode()[index]


def _source(gguf: Any, path: Path, entry: _Entry, groups: Mapping[str, int]) -> WeightSource:
    encoded = _Encoded(lambda: _decode(gguf, path, entry), entry.shape, _DECODED)
    part = entry.name.split(".")[-2]
    if part not in groups:
        return encoded
    return Changed(entry.shape, encoded.dtype, lambda index: _by_halves(encoded.decode(), groups[part])[index])


def _decode(gguf: Any, path: Path, entry: _Entry) -> np.ndarray:
    encoding = gguf.GGMLQuantizationType(entry.encoding)
    block, block_bytes = gguf.GGML_QUANT_SIZES[encoding]
    count = math.prod(entry.shape)
    blocks = np.fromfile(path, np.uint8, count // block * block_bytes, offset=entry.begin)
    if count % block or blocks.size != count // block * block_bytes:
        raise CheckpointError(f"{path}: a damaged GGUF file (it has not all of {entry.name!r})")
    # the library decodes 16 rows at a time, whatever is in a row
    rows = math.gcd(count // block, _ROWS)
    return gguf.quants.dequantize(blocks.reshape(rows, -1), encoding).reshape(entry.shape)


def _by_halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head, there pairs of neighbours, as a folder has them: pairs half a head apart."""
    return array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
