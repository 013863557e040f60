"""Writing GGUF files, which programs such as llama.cpp run: metadata, weights in 32, 16 or fewer bits, a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.errors import ConfigError, did_you_mean
from polyreme.models.files.gguf_file import KEYS, KINDS, MIXTRAL, GGUFKind, gguf_library, turned_by_neighbours

ENCODINGS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    **{name: name.upper() for name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")},
}
"""What weights may be written as, and its name in the format."""
_WORDS = (
    *("llama", "qwen2", "qwen3", "granite", "olmo2", "phi2", "phi3", "stablelm", "starcoder2", "command-r"),
    *("ernie4_5", "glm4", "qwen2moe", "qwen3moe"),
)
WRITTEN: Mapping[str, tuple[str, GGUFKind]] = {
    **{KINDS[word].architecture: (word, KINDS[word]) for word in _WORDS},
    MIXTRAL.architecture: ("llama", MIXTRAL),
}
"""Architectures of config.json that are written, the word that a file has for each, and how."""
_FLOATS = ("_scale", ".scale", "_kqv", "_epsilon")
"""Endings of metadata that are no whole numbers, whatever config.json has."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
_ROUTER = re.compile(r".*\.(gate|shared_expert_gate)\.weight")
"""Names of weights in a folder that say which experts work on a token, which are not rounded."""
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
    matrices whose rows it divides into blocks; the others, vectors and routers stay float32. The experts of a block are
    one tensor. tokenizer: metadata, as
    TextTokenizer.gguf_fields gives it. Raises ConfigError without the library, for another encoding, and for a model
    that a GGUF file does not describe here.
    """
    if encoding not in ENCODINGS:
        raise ConfigError(f"encoding {encoding!r} of a GGUF file{did_you_mean(encoding, ENCODINGS)}")
    gguf = gguf_library()
    word, kind = _kind_of(config)
    fields = _fields_of(word, kind, config)
    groups = turned_by_neighbours(kind, config)
    writer = gguf.GGUFWriter(path, word, use_temp_file=True)
    try:
        name = ENCODINGS[encoding]
        writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES.get(name, f"MOSTLY_{name}")])
        for key, value in {**fields, **(tokenizer or {})}.items():
            _add(writer, key, value)
        for theirs, array in _stacked_experts(weights):
            ours = _name(kind, theirs)
            part = ours.split(".")[-2]
            raw, dtype = encoded(gguf, array, encoding, theirs)
            if part in groups:
                raw, dtype = encoded(gguf, _by_neighbours(array, groups[part]), encoding, theirs)
            elif part == "ffn_gate_inp_shexp":
                raw = raw[0]  # a map to one number lies as a vector
            writer.add_tensor(ours, raw, raw_dtype=dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def encoded(gguf: Any, array: np.ndarray, encoding: str, name: str) -> tuple[np.ndarray, Any]:
    """A weight, by its name in a folder, as it is stored, and the number of its encoding."""
    kind = gguf.GGMLQuantizationType[ENCODINGS[encoding]]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if array.ndim < 2 or array.shape[-1] % block or _ROUTER.fullmatch(name):
        kind = gguf.GGMLQuantizationType.F32
    return gguf.quants.quantize(np.ascontiguousarray(array, np.float32), kind), kind


def decoded(array: np.ndarray, encoding: str, name: str) -> np.ndarray:
    """What a weight of a folder, by its name, is when it is read again, float32."""
    gguf = gguf_library()
    raw, kind = encoded(gguf, array, encoding, name)
    return gguf.quants.dequantize(raw, kind).reshape(array.shape)


def _stacked_experts(weights: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Weights, the experts of a block as one array under a name without a number, when the last of them has come."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    last = ""

    def stack(name: str) -> tuple[str, np.ndarray]:
        parts = stacks.pop(name)
        return name, np.stack([parts[number] for number in range(len(parts))])

    for name, array in weights:
        hit = _EXPERT.fullmatch(name)
        ours = f"{hit[1]}.{{e}}.{hit[3]}" if hit else ""
        if last and ours != last:
            yield stack(last)
        last = ours
        if hit:
            stacks.setdefault(ours, {})[int(hit[2])] = array
        else:
            yield name, array
    if last:
        yield stack(last)


def _kind_of(config: Mapping[str, Any]) -> tuple[str, GGUFKind]:
    (architecture,) = config["architectures"]
    if architecture not in WRITTEN:
        raise ConfigError(f"a {architecture} cannot be written as a GGUF file; {', '.join(WRITTEN)} can")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise ConfigError("rotary positions that are stretched cannot be written as a GGUF file; write a folder")
    if config.get("use_sliding_window"):
        raise ConfigError("sliding windows cannot be written as a GGUF file; write a folder")
    return WRITTEN[architecture]


def _fields_of(word: str, kind: GGUFKind, config: Mapping[str, Any]) -> dict[str, Any]:
    said = {key: config[theirs] for key, theirs in {**KEYS, **kind.keys}.items() if config.get(theirs) is not None}
    fields = {f"{word}.{key}": float(value) if key.endswith(_FLOATS) else value for key, value in said.items()}
    heads = config["num_attention_heads"]
    fields.setdefault(f"{word}.attention.head_count_kv", heads)
    width = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or rope.get("rope_theta")
    turned = config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1))
    sizes = {
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": int(width * turned),
    }
    if config.get("head_dim") is None:
        del sizes["attention.key_length"], sizes["attention.value_length"]  # which are the width over the heads
    fields |= {f"{word}.{key}": value for key, value in sizes.items()}
    return fields | {f"{word}.rope.freq_base": float(theta), f"{word}.vocab_size": config["vocab_size"]}


def _add(writer: Any, key: str, value: Any) -> None:
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adders[type(value)](key, value)


def _name(kind: GGUFKind, theirs: str) -> str:
    stem, _, ending = theirs.rpartition(".")
    outer = {name: ours for ours, name in kind.outer.items()}
    if stem in outer:
        return f"{outer[stem]}.{ending}"
    _, _, number, part = stem.split(".", 3)
    inner = {name: ours for ours, name in kind.inner.items()}
    return f"blk.{number}.{inner[part]}.{ending}"


def _by_neighbours(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head, in a folder pairs half a head apart, as pairs of neighbours."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
