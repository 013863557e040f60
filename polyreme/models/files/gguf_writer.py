"""Writing GGUF files, which programs such as llama.cpp run: metadata, weights in 32, 16 or fewer bits, a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.errors import ConfigError, did_you_mean
from polyreme.models.files.gguf_file import INNER, KEYS, KINDS, OUTER, gguf_library

ENCODINGS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    **{name: name.upper() for name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")},
}
"""What weights may be written as, and its name in the format."""
WRITTEN = ("llama", "qwen2", "qwen3")
"""Those of KINDS that are written."""
_FILE_TYPES = {"F32": "ALL_F32"}


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Iterable[tuple[str, np.ndarray]],
    encoding: str = "float32",
    tokenizer: Mapping[str, Any] | None = None,
) -> None:
    """A model as one file, of which a tensor is in memory at a time.

    config: what config.json of the model says. weights: under the names of a folder. encoding: one of ENCODINGS, of
    matrices whose rows it divides into blocks; the others and vectors stay float32. tokenizer: metadata, as
    TextTokenizer.gguf_fields gives it. Raises ConfigError without the library, for another encoding, and for a model
    that a GGUF file does not describe here.
    """
    if encoding not in ENCODINGS:
        raise ConfigError(f"encoding {encoding!r} of a GGUF file{did_you_mean(encoding, ENCODINGS)}")
    gguf = gguf_library()
    kind = _kind_of(config)
    fields = _fields_of(kind, config)
    groups = {}
    if kind == "llama":
        groups = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    writer = gguf.GGUFWriter(path, kind, use_temp_file=True)
    try:
        name = ENCODINGS[encoding]
        writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES.get(name, f"MOSTLY_{name}")])
        for key, value in {**fields, **(tokenizer or {})}.items():
            _add(writer, key, value)
        for theirs, array in weights:
            ours = _name(theirs)
            part = ours.split(".")[-2]
            if part in groups:
                array = _by_neighbours(array, groups[part])
            raw, dtype = encoded(gguf, array, encoding)
            writer.add_tensor(ours, raw, raw_dtype=dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def encoded(gguf: Any, array: np.ndarray, encoding: str) -> tuple[np.ndarray, Any]:
    """A weight as it is stored, and the number of its encoding."""
    kind = gguf.GGMLQuantizationType[ENCODINGS[encoding]]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if array.ndim < 2 or array.shape[-1] % block:
        kind = gguf.GGMLQuantizationType.F32
    return gguf.quants.quantize(np.ascontiguousarray(array, np.float32), kind), kind


def decoded(array: np.ndarray, encoding: str) -> np.ndarray:
    """What a weight of a folder is when it is read again, float32."""
    gguf = gguf_library()
    raw, kind = encoded(gguf, array, encoding)
    return gguf.quants.dequantize(raw, kind).reshape(array.shape)


def _kind_of(config: Mapping[str, Any]) -> str:
    names = {KINDS[kind].architecture: kind for kind in WRITTEN}
    (architecture,) = config["architectures"]
    if architecture not in names:
        raise ConfigError(f"a {architecture} cannot be written as a GGUF file; {', '.join(names)} can")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise ConfigError("rotary positions that are stretched cannot be written as a GGUF file; write a folder")
    if config.get("use_sliding_window"):
        raise ConfigError("sliding windows cannot be written as a GGUF file; write a folder")
    return names[architecture]


def _fields_of(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    fields = {f"{kind}.{key}": config[theirs] for key, theirs in KEYS.items() if config.get(theirs) is not None}
    heads = config["num_attention_heads"]
    fields.setdefault(f"{kind}.attention.head_count_kv", heads)
    width = config.get("head_dim") or config["hidden_size"] // heads
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    same = {"attention.key_length": width, "attention.value_length": width, "rope.dimension_count": width}
    fields |= {f"{kind}.{key}": value for key, value in same.items()}
    return fields | {f"{kind}.rope.freq_base": float(theta), f"{kind}.vocab_size": config["vocab_size"]}


def _add(writer: Any, key: str, value: Any) -> None:
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adders[type(value)](key, value)


def _name(theirs: str) -> str:
    stem, _, kind = theirs.rpartition(".")
    outer = {name: ours for ours, name in OUTER.items()}
    if stem in outer:
        return f"{outer[stem]}.{kind}"
    _, _, number, part = stem.split(".", 3)
    inner = {name: ours for ours, name in INNER.items()}
    return f"blk.{number}.{inner[part]}.{kind}"


def _by_neighbours(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head, in a folder pairs half a head apart, as pairs of neighbours."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
