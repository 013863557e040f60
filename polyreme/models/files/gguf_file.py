"""GGUF files: one file of metadata, tokenizer and weights, often of few bits. The `gguf` library decodes weights.

Their layout differs from a folder's in names, and for a LLaMA in the order of the rows of queries' and keys' weights:
pairs that are turned together are neighbours there, and lie half a head apart in a folder.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyreme.errors import CheckpointError, ConfigError
from polyreme.models.files.published import Changed, Index, WeightSource

_MAGIC = b"GGUF"
_DECODED = np.dtype("float32")
_NUMBERS = dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))) | {10: "<u8", 11: "<i8", 12: "<f8"}
"""How numbers of the metadata are stored, by the kind that a file names."""
_TEXT, _ARRAY = 8, 9
_ROWS = 256
"""In which a tensor is decoded: a few groups of 16, each small enough for a cache of the processor."""
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
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_AROUND = {**INNER, **_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_EPSILON = {"attention.layer_norm_epsilon": "layer_norm_eps"}
_TWO_LAYERS = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_ROUTED = {"expert_feed_forward_length": "moe_intermediate_size"}
_BIASED = {"attention_bias": "blk.0.attn_q.bias"}


def _expert_names(router: str, experts: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Names of a block's experts, of which all are in one array in a GGUF file, and their router."""
    exps = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    return {**INNER, "ffn_gate_inp": router, **{name: f"{experts}.{{e}}.{ours}" for name, ours in exps.items()}}


_MLP_EXPERTS = _expert_names("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
_SHARED = {f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


@dataclass(frozen=True)
class GGUFKind:
    """What files call a family.

    architecture, model_type: of config.json. keys: metadata of this family alone, as KEYS; fixed: what config.json says
    and files do not, as it is the same in all of them; unsaid: what it says where a file does not; flags: keys of
    config.json that are true where there is a weight of this name. outer, inner: names of weights outside of blocks and
    in them, with {e} where the experts of a block are in one array. by_neighbours: whether rows of queries' and keys'
    weights lie in pairs of neighbours. offset: what is added to the gains of norms there. scalar_layers: so many layers
    has the model whose scores are divided by the root of the width over the heads, and not of a head's width, 0 for no
    such.
    """

    architecture: str
    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    unsaid: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    inner: Mapping[str, str] = field(default_factory=lambda: INNER)
    by_neighbours: bool = False
    offset: float = 0.0
    scalar_layers: int | None = None


KINDS = {
    "llama": GGUFKind("LlamaForCausalLM", "llama", by_neighbours=True),
    "qwen2": GGUFKind("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GGUFKind("Qwen3ForCausalLM", "qwen3"),
    "gemma": GGUFKind("GemmaForCausalLM", "gemma", offset=1.0),
    "gemma2": GGUFKind(
        "Gemma2ForCausalLM", "gemma2", {**_WINDOW, **_CAPS}, inner=_AROUND, offset=1.0, scalar_layers=46
    ),
    "gemma3": GGUFKind(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**_WINDOW, **_CAPS, "rope.freq_base_swa": "rope_local_base_freq"},
        inner=_AROUND,
        offset=1.0,
        scalar_layers=62,
    ),
    "granite": GGUFKind("GraniteForCausalLM", "granite", _SCALES, by_neighbours=True),
    "olmo2": GGUFKind("Olmo2ForCausalLM", "olmo2", inner={**INNER, **_AFTER}),
    "phi3": GGUFKind(
        "Phi3ForCausalLM",
        "phi3",
        _WINDOW,
        inner={**INNER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "phi2": GGUFKind(
        "PhiForCausalLM",
        "phi",
        _EPSILON,
        outer={**OUTER, "output_norm": "model.final_layernorm"},
        inner={**INNER, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    ),
    "olmo": GGUFKind("OlmoForCausalLM", "olmo", {"attention.clamp_kqv": "clip_qkv"}, by_neighbours=True),
    "smollm3": GGUFKind("SmolLM3ForCausalLM", "smollm3", by_neighbours=True),
    "stablelm": GGUFKind(
        "StableLmForCausalLM",
        "stablelm",
        {**_EPSILON, "use_parallel_residual": "use_parallel_residual"},
        flags={"use_qkv_bias": "blk.0.attn_q.bias"},
    ),
    "starcoder2": GGUFKind(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {"attention.layer_norm_epsilon": "norm_epsilon"},
        flags={"use_bias": "blk.0.attn_q.bias"},
        inner={**INNER, **_TWO_LAYERS},
    ),
    "command-r": GGUFKind("CohereForCausalLM", "cohere", {**_EPSILON, "logit_scale": "logit_scale"}, flags=_BIASED),
    "cohere2": GGUFKind(
        "Cohere2ForCausalLM", "cohere2", {**_EPSILON, **_WINDOW, "logit_scale": "logit_scale"}, flags=_BIASED
    ),
    "ernie4_5": GGUFKind("Ernie4_5ForCausalLM", "ernie4_5", flags={"use_bias": "blk.0.attn_q.bias"}),
    "glm4": GGUFKind(
        "Glm4ForCausalLM",
        "glm4",
        flags=_BIASED,
        inner={
            **INNER,
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "exaone4": GGUFKind(
        "Exaone4ForCausalLM", "exaone4", _WINDOW, unsaid={"sliding_window": None}, inner={**INNER, **_AFTER}
    ),
    "seed_oss": GGUFKind(
        "SeedOssForCausalLM",
        "seed_oss",
        flags={**_BIASED, "attention_out_bias": "blk.0.attn_output.bias"},
        inner={**INNER, "post_attention_norm": "post_attention_layernorm"},
    ),
    "arcee": GGUFKind("ArceeForCausalLM", "arcee", flags={"mlp_bias": "blk.0.ffn_up.bias"}, by_neighbours=True),
    "nemotron": GGUFKind(
        "NemotronForCausalLM",
        "nemotron",
        {"attention.layer_norm_epsilon": "norm_eps"},
        unsaid={"partial_rotary_factor": 1.0},
        flags=_BIASED,
        offset=1.0,
    ),
    # gates are divided by their sum, or not, in all files of a kind
    "qwen2moe": GGUFKind(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {**_EXPERTS, **_ROUTED, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {"norm_topk_prob": False},
        inner={**_MLP_EXPERTS, **_SHARED, "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
    ),
    "qwen3moe": GGUFKind(
        "Qwen3MoeForCausalLM", "qwen3_moe", {**_EXPERTS, **_ROUTED}, {"norm_topk_prob": True}, inner=_MLP_EXPERTS
    ),
}
"""Families by the word that a file has for them."""
MIXTRAL = GGUFKind(
    "MixtralForCausalLM",
    "mixtral",
    {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    inner=_expert_names("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    by_neighbours=True,
)
"""What files call a llama with experts."""


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
    name = fields.get("general.architecture")
    if name not in KINDS:
        raise ConfigError(f"{path}: architecture {name!r}; of GGUF files {', '.join(KINDS)} can be had here")
    said = {key.removeprefix(f"{name}."): value for key, value in fields.items() if key.startswith(f"{name}.")}
    kind = MIXTRAL if name == "llama" and said.get("expert_count") else KINDS[name]
    needed = (*_NEEDED, *(() if kind.scalar_layers is None else ("attention.key_length",)))
    lost = next((key for key in needed if type(said.get(key)) is not int or said[key] < 1), None)
    if lost is not None:
        raise CheckpointError(
            f"{path}: {name}.{lost} is {said.get(lost)!r} among the metadata; it is a number of 1 or more"
        )
    config: dict[str, Any] = {"architectures": [kind.architecture], "model_type": kind.model_type, **kind.unsaid}
    config |= {theirs: said[key] for key, theirs in {**KEYS, **kind.keys}.items() if key in said}
    config |= {**kind.fixed, **{key: weight in tensors for key, weight in kind.flags.items()}}
    factors = {key: _decode(gguf, path, tensors[key]).tolist() for key in _ROPE_TENSORS if key in tensors}
    config |= _rotary_config(path, said, factors)
    if kind.scalar_layers is not None:
        is_larger = said.get("block_count") == kind.scalar_layers
        width = said["embedding_length"] // said["attention.head_count"] if is_larger else said["attention.key_length"]
        config["query_pre_attn_scalar"] = width
    if kind.model_type == "phi3":
        config.pop("head_dim", None)  # which is there always the width over the heads
    config["vocab_size"] = tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 0
    config["tie_word_embeddings"] = "output.weight" not in tensors
    groups = turned_by_neighbours(kind, config)
    weights = {key: tensor for key, tensor in tensors.items() if key not in factors}
    return config, {
        name: _source(gguf, path, entry, groups, kind.offset)
        for key, tensor in weights.items()
        for name, entry in _named(gguf, path, key, tensor, kind)
    }


_NEEDED = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""By how much each pair of dims turns slower: always, and in texts of the original length and longer ones."""


def _rotary_config(path: Path, said: Mapping[str, Any], factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """What config.json says of rotary positions. Raises ConfigError for some that are stretched in another way."""
    scaling, always, *by_length = said.get("rope.scaling.type"), *map(factors.get, _ROPE_TENSORS)
    config: dict[str, Any] = {}
    width = said.get("attention.key_length") or said["embedding_length"] // said["attention.head_count"]
    turned = said.get("rope.dimension_count", width)
    if turned != width:
        config["partial_rotary_factor"] = turned / width
    original = said.get("rope.scaling.original_context_length", said["context_length"])
    attention_factor = said.get("rope.scaling.attn_factor", 1.0)
    if always or all(by_length):
        short, long = by_length if all(by_length) else (always, always)
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
            "attention_factor": attention_factor,
        }
    elif scaling in ("linear", "yarn") and attention_factor == 1:
        config["rope_scaling"] = {"rope_type": scaling, "factor": said["rope.scaling.factor"]}
        if scaling == "yarn":
            config["rope_scaling"]["original_max_position_embeddings"] = original
    elif scaling not in (None, "none", "longrope") or attention_factor != 1:
        raise ConfigError(
            f"{path}: its rotary positions are stretched ({scaling}, attn_factor {attention_factor}), which is not "
            "read from GGUF files; use the folder that it was made of"
        )
    return config


def turned_by_neighbours(kind: GGUFKind, config: Mapping[str, Any]) -> dict[str, int]:
    """Heads of the weights in blocks whose rows lie in pairs of neighbours, given config.json."""
    heads = config.get("num_attention_heads", 0)
    return {"attn_q": heads, "attn_k": config.get("num_key_value_heads") or heads} if kind.by_neighbours else {}


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

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._place = data, 0

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
        first = -(-self._place // align) * align
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
            return self._texts(count)
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

    def _texts(self, count: int) -> list[str]:
        """As _text, so many times; a vocabulary has a hundred thousand."""
        texts, data, place = [], self._data, self._place
        for _ in range(count):
            first = place + 8
            place = first + int.from_bytes(data[place:first], "little")
            if place > len(data):
                raise ValueError(f"it ends early, or a length is wrong: {place - first} bytes of a text asked for")
            texts.append(data[first:place].decode("utf-8"))
        self._place = place
        return texts

    def _bytes(self, count: int) -> bytes:
        # memory is taken for what the file has, not for what it says
        read = self._data[self._place : self._place + count]
        if len(read) != count:
            raise ValueError(f"it ends early, or a length is wrong: {count} bytes asked for, {len(read)} there")
        self._place += count
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
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data).read()
    except (ValueError, KeyError, OverflowError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path}: a damaged GGUF file ({error})") from None


def _named(gguf: Any, path: Path, key: str, entry: _Entry, kind: GGUFKind) -> Iterator[tuple[str, _Entry]]:
    """A tensor under its name in a folder, or those that it is there, one for each expert."""
    name = _name(path, key, kind)
    if "{e}" not in name:
        # a map to one number, which lies as a vector in a file
        is_flat = key.split(".")[-2] == "ffn_gate_inp_shexp" and len(entry.shape) == 1
        yield name, entry._replace(shape=(1, *entry.shape)) if is_flat else entry
        return
    if len(entry.shape) != 3:
        raise CheckpointError(f"{path}: {key!r} is {list(entry.shape)}; experts are [experts, out, in]")
    count, *shape = entry.shape
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(entry.encoding)]
    nbytes = math.prod(shape) // block * block_bytes
    for number in range(count):
        begin = entry.begin + number * nbytes
        yield name.replace("{e}", str(number)), entry._replace(shape=tuple(shape), begin=begin)


def _name(path: Path, name: str, kind: GGUFKind) -> str:
    stem, _, ending = name.rpartition(".")
    if stem in kind.outer:
        return f"{kind.outer[stem]}.{ending}"
    _, number, part = [*stem.split(".", 2), "", ""][:3]
    if not stem.startswith("blk.") or part not in kind.inner:
        raise CheckpointError(f"{path}: unknown weight {name!r}")
    return f"model.layers.{number}.{kind.inner[part]}.{ending}"


@dataclass(frozen=True)
class _Encoded:
    """A tensor of a GGUF file; decoded whole, as its blocks are not those of a device's part."""

    decode: Callable[[], np.ndarray]
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, index: Index) -> np.ndarray:
        return self.decode()[index]


def _source(gguf: Any, path: Path, entry: _Entry, groups: Mapping[str, int], offset: float) -> WeightSource:
    encoded = _Encoded(lambda: _decode(gguf, path, entry), entry.shape, _DECODED)
    part = entry.name.split(".")[-2]
    if offset and entry.name.endswith("norm.weight"):
        return Changed(entry.shape, encoded.dtype, lambda index: encoded.read(index) - np.float32(offset))
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
