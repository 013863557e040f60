"""Models that a run begins with or left: fresh ones, published weights, those of another run and what it trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tokenizers import Tokenizer

from polyreme.distributed.checkpoint import CheckpointStore, Manifest
from polyreme.errors import CheckpointError, ConfigError
from polyreme.generation.tokenizer import AutoTokenizer, TextTokenizer
from polyreme.models.auto import AutoModelForCausalLM
from polyreme.models.families import FAMILIES
from polyreme.models.files.adapters import merge_adapters
from polyreme.models.files.folder import CONFIG, weights_digest, write_json
from polyreme.models.files.low_bit_folder import expert_maps, linear_maps, place_decoded, replace_layer
from polyreme.models.files.packages import resolve
from polyreme.models.files.published import write_config
from polyreme.models.pretrained import build_without_values, open_published, read_family_config
from polyreme.models.tokenizer import END_OF_TEXT
from polyreme.nn.quant import QuantizedExperts, QuantizedLinear
from polyreme.recipes.config import ModelConfig, PretrainConfig, RunConfig
from polyreme.recipes.corpus import TOKENIZER
from polyreme.recipes.finetune_config import FinetuneConfig
from polyreme.recipes.weights.build import build_model
from polyreme.recipes.weights.tuning import tune


def checkpoints_of(folder: Path) -> Path:
    """The folder of a run's checkpoints. Raises CheckpointError for a folder that is no run's."""
    checkpoints = folder / "checkpoints"
    if not is_run(folder):
        raise CheckpointError(f"{folder}: no checkpoints/ in it; give the output folder of a run, such as runs/gpt_kjv")
    return checkpoints


def is_run(path: Path) -> bool:
    """Whether a path is the output folder of a run."""
    return (path / "checkpoints").is_dir()


def make_model(config: RunConfig) -> Any:
    """The model that a run trains, as it begins."""
    if isinstance(config, FinetuneConfig):
        model = load_base(config.model)
        tune(model, config)
        return model
    return build_model(config.dimensions)


# weights that fine-tuning begins with, by name: a path, or one of models.files.packages


def load_base(name: str) -> Any:
    """The decoder, in float32 and training mode, all of which trains. Raises ConfigError for a model that writes no
    tokens."""
    path = resolve(name)
    if is_run(path):
        check_reads_tokens(path)
        model = _without_tuning(*load_trained(path))
    else:
        model = AutoModelForCausalLM.from_pretrained(path)
    model.train()
    return model


def _without_tuning(model: Any, meta: Mapping[str, Any]) -> Any:
    """A run's model as a plain decoder: with nothing frozen or added to it, adapters merged."""
    config = run_config(meta)
    if not isinstance(config, FinetuneConfig) or config.fine_tuning == "full":
        return model
    merge_adapters(model)
    plain, merged = load_base(config.model), linear_maps(model)
    for name, layer in linear_maps(plain).items():
        if isinstance(layer, QuantizedLinear) and not isinstance(merged[name], QuantizedLinear):
            replace_layer(plain, name, merged[name])  # what was merged into few bits has full ones
    for name, maps in expert_maps(model).items():
        owner = dict(plain.named_sublayers())[name.rpartition(".")[0]]
        if isinstance(owner.stored()[maps.part], QuantizedExperts):
            place_decoded(owner, maps.part, maps.moe.stored()[maps.part].numpy())
    values = model.state_dict()
    for name, tensor in plain.state_dict().items():
        tensor.set_value(values[name])
    return plain


def base_digest(name: str) -> str:
    """The digest of the weights, 32 hex digits."""
    path = resolve(name)
    if not is_run(path):
        return weights_digest(path)
    return xxhash.xxh3_128_hexdigest(_newest(path).to_json())


def _newest(run: Path) -> Manifest:
    """What the newest checkpoint of a run says of itself. Raises CheckpointError where nothing was saved yet."""
    with CheckpointStore(checkpoints_of(run), read_only=True) as store:
        step = store.latest_step()
        if step is None:
            raise CheckpointError(f"{run}: nothing was saved yet")
        return store.manifest(step)


def check_reads_tokens(run: Path) -> None:
    """Raises ConfigError for the run of a model that is trained on something else than tokens to be written."""
    _dimensions_of_run(run)


def _dimensions_of_run(run: Path) -> dict[str, Any]:
    values = _model_section(_newest(run).meta["config"])
    family = FAMILIES[values.get("family", "gpt")]
    if family.samples != "tokens":
        raise ConfigError(f"{run}: {family.name} takes {family.samples}, not tokens; give a decoder's run")
    return values


@lru_cache(maxsize=8)
def dimensions(name: str, seq_len: int) -> ModelConfig:
    """The dimensions that a configuration would have for a model with these weights, trained on rows of so many tokens.

    Raises ConfigError for weights of a model that writes no tokens, and for rows that are longer than it can read.
    """
    path = resolve(name)
    if is_run(path):
        values = _dimensions_of_run(path)
    else:
        opened = open_published(path, needs_weights=False, task="causal_lm")
        config = read_family_config(opened)
        family = FAMILIES.get(opened.family.name)
        if family is None:
            raise ConfigError(f"{name}: a {opened.family.name} writes no tokens; give a decoder")
        known = {"seq_len", "num_layers", *family.dimensions, *family.settings} & {
            field.name for field in fields(config)
        }
        known -= {"rope_scaling"}  # has no part in sizes
        values = {"family": family.name} | {key: getattr(config, key) for key in known & {*ModelConfig.model_fields}}
        if not family.head_dim:
            values.pop("head_dim", None)
    if seq_len > values["seq_len"]:
        raise ConfigError(
            f"max_seq_len={seq_len}, but {name} has positions for {values['seq_len']} tokens; lower max_seq_len"
        )
    return ModelConfig.model_validate(values | {"seq_len": seq_len})


def _model_section(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The model's dimensions in the configuration of a checkpoint."""
    if "model" in saved:
        return dimensions(saved["model"], saved["max_seq_len"]).model_dump() | {"seq_len": saved["max_seq_len"]}
    return {key.removeprefix("model."): value for key, value in saved.items() if key.startswith("model.")}


def load_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer of a run's folder, of a folder of published weights, or of a GGUF file.

    Raises CheckpointError for a run or folder without one.
    """
    if not is_run(path) or (path / "tokenizer_config.json").is_file():
        return AutoTokenizer.from_pretrained(path)
    file = path / TOKENIZER
    if not file.is_file():
        raise CheckpointError(
            f"{path}: no {TOKENIZER} in it, so its tokens have no text; the run trained on synthetic tokens, or the "
            "file was moved"
        )
    tokenizer = Tokenizer.from_file(str(file))
    end = tokenizer.token_to_id(END_OF_TEXT)
    return TextTokenizer(tokenizer, [] if end is None else [end])


# what a run left


def load_trained(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model of the newest valid checkpoint, on one device, in float32; and what was saved beside it (step, config).

    Adapters of a fine-tuning run are in it. Raises CheckpointError if the folder is not a run's, its checkpoint not of
    this model, or what it was fine-tuned from is no longer there or another.
    """
    with CheckpointStore(checkpoints_of(folder), read_only=True) as store:
        arrays, meta = store.restore()
    model = _model_of(folder, meta)
    # a tied parameter has several names and was saved under the first
    tensors = {id(t): (f"model/{n}", t) for n, t in reversed(model.state_dict().items())}
    for name, tensor in tensors.values():
        if name in arrays:
            tensor.set_value(np.asarray(arrays[name], np.float32))
        elif getattr(tensor, "trainable", True):
            raise CheckpointError(f"{folder}: the checkpoint of step {meta['step']} has no {name}")
    return model, meta


def _model_of(folder: Path, meta: Mapping[str, Any]) -> Any:
    config = run_config(meta)
    if isinstance(config, PretrainConfig):
        return build_model(config.model)
    assert isinstance(config, FinetuneConfig)
    if config.fine_tuning == "full" and (folder / CONFIG).is_file():
        opened = open_published(folder, needs_weights=False, task="causal_lm")
        model = build_without_values(opened, read_family_config(opened))
        if config.record.build is not None:
            config.record.build.load()(model, config)
        return model
    check_base_digest(config.model, meta["host"]["base_digest"], str(folder))
    return make_model(config)


def keep_config(model: Any, folder: Path) -> None:
    """Write the config.json of a model that was loaded, so that a run which trains all of it needs no other folder."""
    published = model.family.published.load()
    write_json(folder / CONFIG, write_config(published, model.config) | {"torch_dtype": "float32"})


def run_config(meta: Mapping[str, Any]) -> RunConfig:
    """The configuration of a checkpoint, given what was saved beside it."""
    saved = meta["config"]
    if "model" not in saved:
        return PretrainConfig(model=ModelConfig(**_model_section(saved)))
    values: dict[str, Any] = {}
    for key, value in saved.items():
        section, dot, name = key.partition(".")
        if dot:
            values.setdefault(section, {})[name] = value
        else:
            values[key] = value
    return FinetuneConfig.model_validate(values)


def check_base_digest(name: str, digest: str, where: str) -> None:
    """Raises CheckpointError where the weights of this name are others than those that were trained on."""
    now = base_digest(name)
    if now != digest:
        raise CheckpointError(
            f"{where}: trained from {name} as it was with digest {digest[:12]}, and it now has {now[:12]}; put those "
            "weights back"
        )
