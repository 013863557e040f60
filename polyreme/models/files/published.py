"""How families are published: the keys of config.json, the names of weights, and what lies otherwise than ours.

A family's file holds one `PublishedFamily`; reading and writing folders (models/files/folder.py) is the same for all.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

import numpy as np

from polyreme.errors import CheckpointError, ConfigError, ShapeError

Index = tuple[slice, ...]


class WeightSource(Protocol):
    """An array that is read in parts, when they are asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def read(self, index: Index, /) -> np.ndarray: ...


@dataclass(frozen=True)
class Changed:
    """A source that is made of others."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]


class Conversion(NamedTuple):
    """How weights as published become one of ours, and back.

    load: (their sources, our config) -> one source. store: (our array, our config) -> theirs, in the order of names.
    join: what parts of one of theirs that several of ours are become together, in the order of the rules.
    """

    load: Callable[[list[WeightSource], Any], WeightSource]
    store: Callable[[np.ndarray, Any], list[np.ndarray]]
    join: Callable[[list[np.ndarray]], np.ndarray] = np.concatenate


def transposed_source(source: WeightSource) -> WeightSource:
    """A matrix of a file, transposed as it is read."""
    return Changed(source.shape[::-1], source.dtype, lambda index: source.read(index[::-1]).T)


def permuted(
    there: Callable[[np.ndarray, Any], np.ndarray], here: Callable[[np.ndarray, Any], np.ndarray]
) -> Conversion:
    """The same numbers in another order: (array, our config) -> array, here of theirs and there of ours."""

    def load(sources: list[WeightSource], config: Any) -> WeightSource:
        (source,) = sources
        # which of theirs a part of ours takes is for `here` to know: it gets all
        whole = tuple(slice(None) for _ in source.shape)
        return Changed(source.shape, source.dtype, lambda index: here(source.read(whole), config)[index])

    return Conversion(load, lambda array, config: [there(array, config)])


def _stacked(sources: Sequence[WeightSource]) -> WeightSource:
    def read(index: Index) -> np.ndarray:
        return np.stack([source.read(index[1:]) for source in sources[index[0]]])

    return Changed((len(sources), *sources[0].shape), sources[0].dtype, read)


SAME = Conversion(lambda sources, config: sources[0], lambda array, config: [array])
TRANSPOSED = Conversion(lambda sources, config: transposed_source(sources[0]), lambda array, config: [array.T])
"""A linear map, [out, in] there."""
EXPERTS = Conversion(
    lambda sources, config: _stacked([transposed_source(source) for source in sources]),
    lambda array, config: [matrix.T for matrix in array],
)
"""A linear map of each expert, one array each there."""


def merged(count: int, is_transposed: bool) -> Conversion:
    """So many arrays there, side by side in the last dim here; linear maps if transposed."""

    def load(sources: list[WeightSource], config: Any) -> WeightSource:
        parts = [transposed_source(source) for source in sources] if is_transposed else sources
        *outer, last = parts[0].shape
        if any(part.shape != parts[0].shape for part in parts):
            raise ShapeError(f"weights that are one here have shapes {[list(source.shape) for source in sources]}")

        def read(index: Index) -> np.ndarray:
            whole = (*index[:-1], slice(None))
            return np.concatenate([part.read(whole) for part in parts], -1)[..., index[-1]]

        return Changed((*outer, count * last), parts[0].dtype, read)

    def store(array: np.ndarray, config: Any) -> list[np.ndarray]:
        return [part.T if is_transposed else part for part in np.split(array, count, -1)]

    return Conversion(load, store)


def transposed(change: Conversion) -> Conversion:
    """A change of linear maps that are [out, in] there, where `change` takes [in, out]."""
    return Conversion(
        lambda sources, config: change.load([transposed_source(source) for source in sources], config),
        lambda array, config: [part.T for part in change.store(array, config)],
    )


def rows_of(sizes: Callable[[Any], Sequence[int]], number: int) -> Conversion:
    """A linear map that is one of several there, one under the other in one array of [out, in]: the part with this
    number of those that have so many rows, given our config."""

    def load(sources: list[WeightSource], config: Any) -> WeightSource:
        (whole,), rows = sources, sizes(config)
        if len(whole.shape) != 2 or whole.shape[0] != sum(rows):
            raise ShapeError(f"a weight of {list(whole.shape)}, of which {list(rows)} rows are one map each")
        start = sum(rows[:number])

        def read(index: Index) -> np.ndarray:
            columns, taken = index[0], range(rows[number])[index[1]]
            return whole.read((slice(start + taken.start, start + taken.stop), columns)).T

        return Changed((whole.shape[1], rows[number]), whole.dtype, read)

    return Conversion(load, lambda array, config: [array.T])


def in_turn(count: int, number: int) -> Conversion:
    """One of so many arrays whose last dims take turns in one array there: every count-th, from this number on."""

    def load(sources: list[WeightSource], config: Any) -> WeightSource:
        (whole,) = sources
        *outer, last = whole.shape
        if last % count:
            raise ShapeError(f"a weight of {list(whole.shape)}, of which {count} take turns in the last dim")

        def read(index: Index) -> np.ndarray:
            taken = range(last // count)[index[-1]]
            return whole.read((*index[:-1], slice(count * taken.start + number, count * taken.stop, count)))

        return Changed((*outer, last // count), whole.dtype, read)

    def join(parts: list[np.ndarray]) -> np.ndarray:
        return np.stack(parts, -1).reshape(*parts[0].shape[:-1], -1)

    return Conversion(load, lambda array, config: [array], join)


class WeightRule(NamedTuple):
    """A weight: its name there, its name here, and what else differs. Of several with one name there each is a part of
    it, one under the other in the order of the rules, or as their conversion joins them.

    {n} in names stands for the number of a block; in theirs {e} for that of an expert, and {a,b} for a and b: all of
    them are one of ours.
    """

    theirs: str
    ours: str
    change: Conversion = TRANSPOSED


def rules_of_part(rules: Sequence[WeightRule], theirs: str, ours: str, part: Callable[[Any], Any]) -> list[WeightRule]:
    """The rules of a model that is a part of another: names begin with these there and here, and conversions take what
    `part` gives of the whole's config."""

    def of_part(change: Conversion) -> Conversion:
        return Conversion(
            lambda sources, config: change.load(sources, part(config)),
            lambda array, config: change.store(array, part(config)),
            change.join,
        )

    return [WeightRule(theirs + rule.theirs, ours + rule.ours, of_part(rule.change)) for rule in rules]


@dataclass(frozen=True)
class PublishedFamily:
    """How a family is published.

    architecture, model_type: of config.json. keys: its keys and the fields of our config that they are. spellings:
    other names of keys -> the keys. defaults: what it means by leaving a key out. fixed: keys that must say one of
    these, as nothing else can be had here. weights: our config -> all of them. spare: (the name of a weight in a file,
    our config) -> whether it may be left out. prefix: what names in a file of the model without its head leave out.
    bare: whether this is that model, which is written without the prefix. heads: what the names of weights of heads
    begin with: of those that the model has not, a file may have any. rename: what a name in an older file is now. read:
    the fields of our config that keys alone do not give, from the whole of config.json; read_keys: the keys that it
    looks at. write: the keys that these fields become. fit: (the fields of our config, the names of weights in the
    files) -> the fields, where a part of the model that is not in the files is left out. token_head: what the map is
    called there that scores tokens, of a decoder.
    """

    architecture: str
    model_type: str
    keys: Mapping[str, str]
    weights: Callable[[Any], Sequence[WeightRule]]
    spellings: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    spare: Callable[[str, Any], bool] = lambda name, config: False
    prefix: str = ""
    bare: bool = False
    heads: tuple[str, ...] = ("lm_head.weight",)
    rename: Callable[[str], str] = lambda name: name
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    read_keys: tuple[str, ...] = ()
    write: Callable[[Any], dict[str, Any]] = lambda config: {}
    fit: Callable[[dict[str, Any], Collection[str]], dict[str, Any]] = lambda fields, names: fields
    token_head: str = "score"


# of config.json: what training, a tokenizer or a program that generates needs, and this function of tokens does not
_WITHOUT_EFFECT = frozenset(
    """
    architectures model_type transformers_version torch_dtype dtype _name_or_path use_cache initializer_range
    bos_token_id eos_token_id pad_token_id unk_token_id attention_dropout pretraining_tp auto_map is_decoder
    keys_to_ignore_at_inference task_specific_params summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout attn_pdrop embd_pdrop resid_pdrop output_router_logits
    router_aux_loss_coef aux_loss_alpha ep_size seq_aux unsloth_version unsloth_fixed _attn_implementation
    problem_type initializer_factor gradient_checkpointing is_llama_config id2label label2id
    num_beams num_beam_groups max_length min_length do_sample early_stopping temperature top_k top_p typical_p
    repetition_penalty diversity_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    num_return_sequences remove_invalid_values return_dict output_hidden_states output_attentions
    chunk_size_feed_forward sentence_transformers sbert_ce_default_activation_function
    """.split()  # noqa: SIM905  (a list would take forty lines)
)
# of config.json: what another model would have, and this has not where it says no
_NOTHING_IF_FALSE = frozenset(
    """
    add_cross_attention is_encoder_decoder output_scores return_dict_in_generate rope_interleaved tf_legacy_loss
    tie_encoder_decoder torchscript use_bfloat16 use_mrope
    """.split()  # noqa: SIM905  (as above)
)
# of those what is said of one file, and auto_map, which names code
_OF_A_FILE = frozenset({"architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path"})
_OF_A_FILE |= {"auto_map"}
_CHOICES = re.compile(r"\{(\w+(?:,\w+)+)\}")
# of weights: what older versions stored beside them, made again from config.json
_DERIVED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias|embeddings\.position_ids)")


def read_config(published: PublishedFamily, config: Mapping[str, Any], ignore: Sequence[str] = ()) -> dict[str, Any]:
    """Fields of our config.

    ignore: keys of config.json that may say anything. Raises ConfigError for a key that says what cannot be had here,
    and for one that is not known and says something: a model that is another one would else be taken for this.
    """
    config = {**published.defaults, **_respelled(published, _without(config, ignore))}
    for key, accepted in published.fixed.items():
        if key in config and config[key] not in accepted:
            raise ConfigError(
                f"config.json of a {published.model_type}: {key} is {config[key]!r}, and only "
                f"{' or '.join(map(repr, accepted))} can be had here"
            )
    known = {*published.keys, *published.fixed, *published.read_keys, *_WITHOUT_EFFECT}
    unknown = {
        key: value
        for key, value in config.items()
        if key not in known and value not in (None, {}, []) and not (value is False and key in _NOTHING_IF_FALSE)
    }
    if unknown:
        raise ConfigError(
            f"config.json of a {published.model_type} has keys that are not known here: "
            f"{', '.join(f'{key}={value!r:.60}' for key, value in unknown.items())}; if they do not change what the "
            f"model computes, give ignore={list(unknown)}"
        )
    fields = {ours: config[key] for key, ours in published.keys.items() if config.get(key) is not None}
    for key, ours in published.keys.items():
        value, most = config.get(key), _MOST_BLOCKS if ours == "num_layers" else _MOST
        if isinstance(value, (int, float)) and not abs(value) <= most:
            raise ConfigError(f"config.json of a {published.model_type}: {key} is {value!r:.40}; give at most {most}")
    try:
        return fields | published.read(config)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError) as error:
        raise ConfigError(
            f"config.json of a {published.model_type}: a value is missing, of another type or out of range "
            f"({type(error).__name__}: {error})"
        ) from error


def check_fields(config_class: Any, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value that is of none of the types that its field of a dataclass names."""
    for named in dataclass_fields(config_class):
        kinds = {kind.strip() for kind in str(named.type).split("|")}
        if named.name not in fields or not kinds <= _KINDS.keys():
            continue
        value = fields[named.name]
        if not any(_KINDS[kind](value) for kind in kinds):
            raise ConfigError(
                f"{config_class.__name__}: {named.name} is {value!r:.60}; give {' or '.join(sorted(kinds))}"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    "float": _is_number,
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "None": lambda value: value is None,
}
_MOST, _MOST_BLOCKS = 2**31 - 1, 2**16
"""Of numbers that say how large a model is: memory is not taken for what no model has."""


def _respelled(published: PublishedFamily, config: dict[str, Any]) -> dict[str, Any]:
    """config by its keys' own names. Raises ConfigError for two names of one that say different things."""
    for other, key in published.spellings.items():
        if other in config and config.setdefault(key, config[other]) != config.pop(other):
            raise ConfigError(
                f"config.json of a {published.model_type}: {key} is {config[key]!r}, and {other}, which is the same by "
                "another name, says otherwise; leave one of them out"
            )
    return config


def _without(config: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """config without these keys, those of its parts too."""
    return {
        key: _without(value, keys) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in keys
    }


def write_config(published: PublishedFamily, config: Any) -> dict[str, Any]:
    """What config.json says of our config."""
    keys = {key: getattr(config, ours) for key, ours in published.keys.items()}
    fixed = {key: accepted[0] for key, accepted in published.fixed.items()}
    first = {"architectures": [published.architecture], "model_type": published.model_type}
    return first | keys | fixed | published.write(config)


def kept_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json that are none of the model's and go with its weights, as the ids that end a text."""
    return {key: value for key, value in config.items() if key in _WITHOUT_EFFECT - _OF_A_FILE}


class Weight(NamedTuple):
    """One of our parameters: its name, the names of what it is made of, and how; place: of its rule among the rules."""

    ours: str
    theirs: tuple[str, ...]
    change: Conversion
    place: int


def match(published: PublishedFamily, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[Weight]:
    """What our parameters, by name, are made of. Raises ConfigError for one that no rule names."""
    weights = []
    patterns = [
        (re.compile(re.escape(rule.ours).replace(r"\{n\}", r"(\d+)")), rule) for rule in published.weights(config)
    ]
    for name, shape in shapes.items():
        for place, (pattern, rule) in enumerate(patterns):
            if hit := pattern.fullmatch(name):
                number = hit[1] if hit.groups() else ""
                theirs = rule.theirs.replace("{n}", number)
                choices = _CHOICES.search(theirs)
                parts = choices[1].split(",") if choices else [*map(str, range(shape[0]))] if "{e}" in theirs else []
                names = [re.sub(r"\{.+?\}", part, theirs) for part in parts] or [theirs]
                weights.append(Weight(name, tuple(names), rule.change, place))
                break
        else:
            raise ConfigError(f"{published.architecture}: no rule says what {name} is made of")
    return weights


def load_weights(
    published: PublishedFamily,
    config: Any,
    shapes: Mapping[str, tuple[int, ...]],
    files: Mapping[str, WeightSource],
    where: str,
    new_head: bool = False,
) -> Iterator[tuple[str, WeightSource]]:
    """The sources of our parameters, by name.

    files: what there is, by its name there. new_head: leaves out the weights of a head that are not there.
    Raises CheckpointError that lists what is missing and what is too much, and ShapeError for a weight of another
    shape, before anything is read.
    """
    files = _with_prefix(published, {published.rename(name): source for name, source in files.items()})
    weights = match(published, config, shapes)
    wanted = {name for weight in weights for name in weight.theirs}
    # heads of other tasks, or a copy of the embedding where the model has no head of its own
    others = tuple(head for head in published.heads if not any(name.startswith(head) for name in wanted))
    extra = sorted(
        name
        for name in files.keys() - wanted
        if not (name.startswith(others) or _DERIVED.fullmatch(name) or published.spare(name, config))
    )
    missing = sorted(wanted - files.keys())
    is_head_alone = bool(missing) and all(name.startswith(published.heads) for name in missing)
    if extra or (missing and not (is_head_alone and new_head)):
        advice = "; give new_head=True to begin with new values for them" if is_head_alone and not extra else ""
        raise CheckpointError(
            f"{where}: these are not the weights of a {published.architecture} as config.json describes it; "
            f"{_few('missing', missing)}{' and ' if missing and extra else ''}{_few('not known', extra)}{advice}"
        )
    for weight in weights:
        if not files.keys() >= {*weight.theirs}:
            continue
        source = weight.change.load([files[name] for name in weight.theirs], config)
        if source.shape != shapes[weight.ours]:
            theirs = files[weight.theirs[0]].shape
            raise ShapeError(
                f"{where}: {weight.theirs[0]} is {list(theirs)}, which makes {weight.ours} {list(source.shape)}; "
                f"config.json says {list(shapes[weight.ours])}"
            )
        yield weight.ours, source


def store_weights(
    published: PublishedFamily, config: Any, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """The weights as published, one of our parameters after the other; read: name -> its array."""
    weights = match(published, config, shapes)
    missing = Counter(name for weight in weights for name in weight.theirs)
    parts: dict[str, list[tuple[int, np.ndarray]]] = {}
    for weight in weights:
        for name, array in zip(weight.theirs, weight.change.store(read(weight.ours), config), strict=True):
            missing[name] -= 1
            parts.setdefault(name, []).append((weight.place, array))
            if missing[name]:
                continue
            arrays = [part for _, part in sorted(parts.pop(name), key=lambda item: item[0])]
            array = arrays[0] if len(arrays) == 1 else weight.change.join(arrays)
            yield name.removeprefix(published.prefix) if published.bare else name, array


def _with_prefix(published: PublishedFamily, files: Mapping[str, WeightSource]) -> Mapping[str, WeightSource]:
    prefix = published.prefix
    if not prefix or any(name.startswith(prefix) for name in files):
        return files
    return {name if name.startswith(published.heads) else prefix + name: source for name, source in files.items()}


def _few(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{what}: {', '.join(names[:8])}{more}"
