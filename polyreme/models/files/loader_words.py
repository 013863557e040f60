"""Arguments of from_pretrained in the words of transformers and of PaddleNLP: what each is here, and which change
nothing here, where they ask for what is done anyway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from polyreme.errors import ConfigError

ALIASES = {"torch_dtype": "dtype", "num_classes": "num_labels", "id2label": "label_names"}
"""Words that are another argument or field here."""


class LoaderWord(NamedTuple):
    """is_met: whether a value asks for what is done anyway. advice: what to do where it asks for something else."""

    is_met: Callable[[Any], bool]
    advice: str


def one_of(*values: Any) -> Callable[[Any], bool]:
    """Whether a value is None or one of these."""
    return lambda value: any(value is one or (type(value) is type(one) and value == one) for one in (None, *values))


def anything(value: Any) -> bool:
    """Whether a value is one."""
    return True


def without_met(owner: str, words: Mapping[str, Any], table: Mapping[str, LoaderWord]) -> dict[str, Any]:
    """words without those of a table, whose values ask for what is done anyway. Raises ConfigError, said by `owner`,
    for one that asks for something else."""
    for name in words.keys() & table.keys():
        if not table[name].is_met(words[name]):
            raise ConfigError(f"{owner}: {name}={words[name]!r:.60} cannot be had here; {table[name].advice}")
    return {name: value for name, value in words.items() if name not in table}


_PLAN = "give plan=, as Plan.from_degrees(mp=2), and devices="
_FOLDER = "from_pretrained reads a folder that is there; fetch it first"
_FEW_BITS = "round the folder with polyreme quantize, which writes one that is read in few bits"
_WORDS: dict[str, LoaderWord] = {
    "device_map": LoaderWord(one_of("auto"), _PLAN),
    "tensor_parallel_degree": LoaderWord(one_of(1, -1), _PLAN),
    "tensor_parallel_rank": LoaderWord(one_of(0), _PLAN),
    "tensor_parallel_output": LoaderWord(anything, ""),
    "low_cpu_mem_usage": LoaderWord(anything, ""),
    # no code of a folder runs, whatever is trusted
    "trust_remote_code": LoaderWord(anything, ""),
    "use_safetensors": LoaderWord(one_of(True), "files that can run code when they are loaded are not read"),
    "attn_implementation": LoaderWord(
        one_of("eager", "sdpa", "flash_attention_2", "flash_attention_3"), "leave it out"
    ),
    "use_flash_attention": LoaderWord(anything, ""),
    "local_files_only": LoaderWord(anything, ""),
    "revision": LoaderWord(one_of("main"), _FOLDER),
    "cache_dir": LoaderWord(one_of(), _FOLDER),
    "force_download": LoaderWord(one_of(False), _FOLDER),
    "token": LoaderWord(one_of(False), _FOLDER),
    "from_tf": LoaderWord(one_of(False), _FOLDER),
    "from_flax": LoaderWord(one_of(False), _FOLDER),
    "convert_from_hf": LoaderWord(anything, ""),
    "convert_from_torch": LoaderWord(anything, ""),
    "ignore_mismatched_sizes": LoaderWord(one_of(False), "a head of another size begins anew with new_head=True"),
    "output_loading_info": LoaderWord(one_of(False), "what is missing or left over is an error"),
    "load_in_8bit": LoaderWord(one_of(False), _FEW_BITS),
    "load_in_4bit": LoaderWord(one_of(False), _FEW_BITS),
    "quantization_config": LoaderWord(one_of(), _FEW_BITS),
    "use_cache": LoaderWord(anything, ""),
    "label2id": LoaderWord(anything, ""),  # id2label says it
}


def read_words(dtype: Any, words: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The dtype that is asked for, and of words those that are fields of a config. Raises ConfigError for one that asks
    for what is not done, and for two words of one argument that say different things."""
    fields: dict[str, Any] = {}
    for name, value in without_met("from_pretrained", words, _WORDS).items():
        ours = ALIASES.get(name, name)
        value = _names(value) if name == "id2label" else value
        if ours == "dtype" and dtype is None:
            dtype = value
        elif (dtype if ours == "dtype" else fields.setdefault(ours, value)) != value:
            raise ConfigError(f"from_pretrained: {name}={value!r:.60}, and {ours} says otherwise; give one of them")
    return _own_dtype(dtype), fields


def _own_dtype(dtype: Any) -> Any:
    """dtype, or where it is torch's the name of it."""
    is_named = isinstance(dtype, str) or type(dtype).__module__ == "torch"
    return str(dtype).removeprefix("torch.") if is_named else dtype


def _names(labels: Any) -> tuple[str, ...]:
    """Names of labels by their number, in order."""
    if not isinstance(labels, Mapping) or sorted(map(int, labels)) != list(range(len(labels))):
        raise ConfigError(f"from_pretrained: id2label={labels!r:.60}; give a name for each of 0, 1, ...")
    return tuple(str(name) for _, name in sorted((int(number), name) for number, name in labels.items()))
