"""Merges what fine-tuning trained with the weights it began from, in a folder of published weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.distributed.checkpoint import CheckpointStore
from polyreme.errors import CheckpointError, ConfigError
from polyreme.models.files.adapters import (
    LowRank,
    check_base,
    is_adapter,
    joined,
    linear_modules,
    map_of,
    open_adapter,
    products_by_name,
    rounded,
)
from polyreme.models.files.low_bit_folder import low_bit_layers
from polyreme.models.files.packages import resolve
from polyreme.models.files.published import PublishedFamily, kept_keys
from polyreme.models.pretrained import build_without_values, named_tensors, write_folder
from polyreme.nn.layers.lora import dense_weight
from polyreme.nn.quant import QuantizedExperts
from polyreme.recipes.corpus import TOKENIZER
from polyreme.recipes.finetune_config import FinetuneConfig
from polyreme.recipes.weights.base import (
    base_digest,
    check_base_digest,
    checkpoints_of,
    is_run,
    load_base,
    load_tokenizer,
    run_config,
)
from polyreme.recipes.weights.published import (
    MatchedWeights,
    check_new_folder,
    copy_beside,
    floating_dtype,
    new_folder,
    open_matched,
)
from polyreme.recipes.weights.tuning import lora_of

_MODEL = "model/"


@dataclass(frozen=True)
class _Weights:
    """Weights to be read one after another, under our names. more: keys of config.json that are none of the model's.
    are_decoded: whether they lie in few bits, and are read decoded."""

    published: PublishedFamily
    model: Any
    read: Callable[[str], np.ndarray]
    more: Mapping[str, Any]
    are_decoded: bool = False


@dataclass(frozen=True)
class _Change:
    """A change of weights: trained ones replace them, products are added to them."""

    trained: Mapping[str, np.ndarray]
    products: Mapping[str, LowRank]
    weight_dtype: str = ""
    """Of the codes that the weights of linear maps were stored in meanwhile."""

    def of(self, weights: _Weights) -> Callable[[str], np.ndarray]:
        """name -> the weight, changed, in the dtype that it has."""
        maps = linear_modules(weights.model) if self.weight_dtype and not weights.are_decoded else {}

        def read(name: str) -> np.ndarray:
            if name in self.trained:
                return self.trained[name]
            module = name.removesuffix(".weight")
            weight, product = weights.read(name), self.products.get(module)
            if self.weight_dtype and module in maps:
                weight = rounded(weight, self.weight_dtype)
            return weight if product is None else product.merged(weight)

        return read


def merge(
    source: Path,
    target: Path,
    *,
    base: str | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    say: Callable[[str], None],
) -> None:
    """Write the model of a fine-tuning run, or of an adapter's folder, as a folder of published weights.

    One weight of the base is in memory at a time. base: its path if not the one that was trained on, with the same
    digest. dtype: of the weights, as the base's are if None. The target appears when all of it is there. Raises
    CheckpointError for a base of another digest, ConfigError for what was not fine-tuned and for a target that holds
    anything.
    """
    check_new_folder(target)
    wanted = floating_dtype(dtype)
    if is_adapter(source):
        adapter = open_adapter(source)
        name = base or adapter.base
        if not name:
            raise ConfigError(f"{source}: does not name the weights it was trained on; give --base")
        check_base(adapter, base_digest(name), name)
        weights, tokenizer_of = _open(name), resolve(name)
        change = _Change({}, products_by_name(adapter, weights.model), adapter.weight_dtype)
        if (source / TOKENIZER).is_file():  # with the template that it was trained by
            tokenizer_of = source
    else:
        name, change = _of_run(source, base)
        weights, tokenizer_of = _open(name), source
    known = named_tensors(weights.model).keys()
    lost = [name for name in change.trained if name not in known]
    lost += [name for name in change.products if not known & {name, f"{name}.weight"}]
    if lost:
        raise CheckpointError(f"{source}: {name} has no {min(lost)}; give the weights that it was trained on")
    with new_folder(target) as partial:
        write_folder(
            partial,
            weights.published,
            weights.model,
            change.of(weights),
            max_shard_size=max_shard_size,
            dtype=wanted,
            more=weights.more,
        )
        if is_run(tokenizer_of):
            load_tokenizer(tokenizer_of).save_pretrained(partial)
        else:
            copy_beside(tokenizer_of, partial, say)
    counts = f"{len(change.trained)} weights trained, {len(change.products)} merged"
    say(f"{target}: {weights.published.architecture}, {counts}")


def _of_run(folder: Path, base: str | None) -> tuple[str, _Change]:
    """(the name of the base, what the newest checkpoint changes of it)."""
    with CheckpointStore(checkpoints_of(folder), read_only=True) as store:
        arrays, meta = store.restore()
    config = run_config(meta)
    if not isinstance(config, FinetuneConfig):
        raise ConfigError(f"{folder}: a pretraining run, which has nothing to merge; polyreme export writes its model")
    if config.record.build is not None:
        raise ConfigError(
            f"{folder}: stage {config.stage} trained parameters that published weights do not have; "
            "load_trained reads it"
        )
    name = base or config.model
    check_base_digest(name, meta["host"]["base_digest"], str(folder))
    saved = {key.removeprefix(_MODEL): np.asarray(a) for key, a in arrays.items() if key.startswith(_MODEL)}
    if config.fine_tuning != "lora":
        return name, _Change({key: array.astype(np.float32) for key, array in saved.items()}, {})
    lora, parts = lora_of(config), {}
    for key, array in saved.items():
        module, _, part = key.rpartition(".")
        parts.setdefault(map_of(module), {})[part] = array.astype(np.float32)
    return name, _Change({}, {module: joined(lora, arrays) for module, arrays in parts.items()}, config.weight_dtype)


def _open(name: str) -> _Weights:
    """The weights of a name, those in few bits decoded, and a model of their shapes. Raises ConfigError for weights of
    few bits whose inputs are rounded too."""
    path = resolve(name)
    if is_run(path):
        model = load_base(name)
        tensors = named_tensors(model)
        return _Weights(model.family.published.load(), model, lambda key: tensors[key].numpy(), {})
    matched = open_matched(path)
    if matched.opened.layout is not None:
        return _decoded(name, matched)
    return _Weights(matched.opened.published, matched.model, matched.read, kept_keys(matched.opened.config))


def _decoded(name: str, matched: MatchedWeights) -> _Weights:
    opened, model = matched.opened, load_base(name)
    if opened.layout is not None and opened.layout.low_bit_input:
        raise ConfigError(
            f"{name}: rounds what its linear maps take in too, which no weight that an adapter is merged into does; "
            "serve it with --adapter, or train beside the weights that it was made of"
        )
    layers, tensors = low_bit_layers(model), named_tensors(model)

    def read(key: str) -> np.ndarray:
        layer = layers.get(key.removesuffix(".weight"))
        if isinstance(layer, QuantizedExperts):
            return layer.decoded("float32").numpy()
        return tensors[key].numpy() if layer is None else dense_weight(layer).numpy()

    plain = build_without_values(opened._replace(layout=None), matched.config)
    return _Weights(opened.published, plain, read, kept_keys(opened.config), are_decoded=True)
