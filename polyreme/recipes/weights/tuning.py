"""The choice of the parameters that a fine-tuning run trains, adapters included."""

from __future__ import annotations

import math
from typing import Any

from polyreme.errors import ConfigError
from polyreme.models.files.adapters import add_adapters, quantize_maps
from polyreme.models.files.low_bit_folder import linear_maps, low_bit_layers, replace_layer
from polyreme.nn.layers.linear import Linear
from polyreme.nn.layers.lora import LoRA
from polyreme.nn.quant import RoundedLinear
from polyreme.ops.random import uniform
from polyreme.recipes.finetune_config import FinetuneConfig


def tune(model: Any, config: FinetuneConfig) -> None:
    """Make the parameters that the configuration names trainable, those of adapters included, and no others.

    Raises ConfigError for blocks and linear maps that the model has not.
    """
    if config.fine_tuning == "lora":
        if config.weight_dtype:
            if low_bit_layers(model):
                raise ConfigError(
                    f"weight_quantize_algo={config.weight_quantize_algo}: {config.model} has weights of few bits "
                    "already; leave it out"
                )
            quantize_maps(model, config.weight_dtype)
        add_adapters(model, lora_of(config), config.lora_target)
    elif config.fine_tuning == "freeze":
        _freeze(model, config.freeze_trainable_layers)
    elif config.qat:
        for name, layer in linear_maps(model).items():
            if not isinstance(layer, Linear):
                raise ConfigError(
                    f"qat={config.qat}: {name} of {config.model} has weights of few bits already, which do not train; "
                    "give the weights before they were rounded"
                )
            replace_layer(model, name, RoundedLinear(layer, config.qat.removeprefix("w"), config.qat_group_size))
    if config.record.build is not None:
        config.record.build.load()(model, config)
    if config.neftune_noise_alpha:
        _add_noise(model.tokens, config.neftune_noise_alpha)
    model.train()


def lora_of(config: FinetuneConfig) -> LoRA:
    """The LoRA settings of linear maps."""
    return LoRA(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        rslora=config.rslora,
        use_dora=config.use_dora,
        pissa_init=config.pissa_init,
        loraplus_lr_ratio=config.loraplus_lr_ratio,
    )


def _freeze(model: Any, count: int) -> None:
    blocks = list(model.blocks)
    if count > len(blocks):
        raise ConfigError(f"freeze_trainable_layers={count}: the model has {len(blocks)} blocks; give at most as many")
    trained = {id(p) for block in blocks[len(blocks) - count :] for p in block.parameters()}
    for p in model.parameters():
        if not p.is_statistic:
            p.trainable = id(p) in trained


def _add_noise(embedding: Any, alpha: float) -> None:
    """While training, uniform noise of +-alpha / sqrt(seq width) on embeddings [batch, seq, width].

    Source: NEFTune, arXiv:2310.05914, algorithm 1.
    """

    def noisy(layer: Any, inputs: Any, out: Any) -> Any:
        if not layer.training:
            return None
        limit = alpha / math.sqrt(out.shape[1] * out.shape[2])
        return out + uniform(out.shape, out.dtype, -limit, limit)

    embedding.register_forward_post_hook(noisy)
