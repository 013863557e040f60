"""LLaVA: what an image's encoder makes of patches, mapped to the width of a decoder, stands in its rows.

Source: arXiv:2304.08485, arXiv:2310.03744. Same function as transformers' LlavaForConditionalGeneration. Any family of
decoders that is published may write, and a CLIP or a SigLIP may see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from polyreme.errors import ConfigError
from polyreme.models.decoders.llama import LlamaConfig
from polyreme.models.families import FAMILIES, architecture
from polyreme.models.files.published import PublishedFamily, WeightRule, write_config
from polyreme.models.parts.encoder import ACTIVATIONS, check_activation, linear, linear_rules
from polyreme.models.parts.image_text import ImageTextModel, language_rules, published_text, read_text_config
from polyreme.models.vision import clip, siglip
from polyreme.models.vision.clip import CLIPVision, CLIPVisionConfig, read_part
from polyreme.models.vision.siglip import SiglipVision, SiglipVisionConfig
from polyreme.nn import Layer
from polyreme.nn.layers.linear import Linear
from polyreme.ops.manipulation import concat


class Tower(NamedTuple):
    """An encoder of images: its class, its config's, how it is published, and whether its first vector is of no
    patch."""

    model: type[CLIPVision | SiglipVision]
    config: type[CLIPVisionConfig]
    published: PublishedFamily
    rules: Any
    has_class: bool


TOWERS = (
    Tower(CLIPVision, CLIPVisionConfig, clip.PUBLISHED_VISION, clip.vision_rules, True),
    Tower(SiglipVision, SiglipVisionConfig, siglip.PUBLISHED_VISION, siglip.vision_rules, False),
)
STRATEGIES = ("default", "full")
"""Whether the first vector of an image, which is of no patch, is left out."""


def tower_of(config: CLIPVisionConfig) -> Tower:
    """The encoder with such a config."""
    return next(tower for tower in TOWERS if tower.config is type(config))


@dataclass(frozen=True)
class LlavaConfig:
    """Dimensions of a LLaVA.

    text: of the decoder, which is of this family. vision: a CLIPVisionConfig or SiglipVisionConfig. image_token: the id
    that stands for a vector of an image. feature_layers: numbers of blocks of the encoder whose outputs an image's
    vectors are made of, side by side; 0 for what the first block takes, from the last one on if below 0. strategy: one
    of STRATEGIES. activation, projector_bias: of the two maps to the decoder's width.
    """

    text: Any = field(default_factory=LlamaConfig)
    vision: CLIPVisionConfig = field(default_factory=CLIPVisionConfig)
    family: str = "llama"
    image_token: int = 32000
    feature_layers: Sequence[int] = (-2,)
    strategy: str = "default"
    activation: str = "gelu"
    projector_bias: bool = True

    def __post_init__(self) -> None:
        check_activation("LlavaConfig", self.activation)
        if FAMILIES.named(self.family).config.load() is not type(self.text):
            raise ConfigError(
                f"LlavaConfig: text is a {type(self.text).__name__}, which is not of family {self.family}"
            )
        if not 0 <= self.image_token < self.text.vocab_size:
            raise ConfigError(
                f"LlavaConfig: image_token {self.image_token}; give an id of the vocabulary, below "
                f"{self.text.vocab_size}"
            )
        if self.strategy not in STRATEGIES or (self.strategy == "default" and not tower_of(self.vision).has_class):
            raise ConfigError(
                f"LlavaConfig: strategy {self.strategy!r}; give {' or '.join(STRATEGIES)}, and full for an encoder "
                "whose vectors are all of patches"
            )
        layers, most = self.feature_layers, self.vision.num_layers
        if not layers or any(not -most - 1 <= layer <= most for layer in layers):
            raise ConfigError(f"LlavaConfig: feature_layers {layers!r}; give some of {-most - 1} to {most}")
        object.__setattr__(self, "feature_layers", tuple(layers))

    @property
    def vocab_size(self) -> int:
        """That of the decoder."""
        return self.text.vocab_size

    @property
    def seq_len(self) -> int:
        """Places of a row, those of images among them."""
        return self.text.seq_len

    @classmethod
    def nano(cls, **changes: Any) -> LlavaConfig:
        """A LLaVA that trains in seconds on a CPU, whose images are four patches."""
        vision = CLIPVisionConfig(hidden_size=24, num_heads=4, num_layers=2, ffn_size=32, image_size=8, patch_size=4)
        base = {"text": LlamaConfig.nano(seq_len=32), "vision": vision, "image_token": 5}
        return cls(**{**base, **changes})


class Projector(Layer):
    """Two linear maps from what is seen to the decoder's width."""

    up: Linear
    down: Linear

    def __init__(self, ins: int, outs: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.up = linear(ins, outs, ("embed", "ffn"), bias)
        self.down = linear(outs, outs, ("ffn", "embed"), bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x_bse: Any) -> Any:
        return self.down(self.activation(self.up(x_bse)))


class Llava(ImageTextModel):
    """As ImageTextModel, of images [images, channels, image_size, image_size].

    >>> from polyreme.eager.tensor import to_tensor
    >>> from polyreme.ops.random import randn
    >>> model = Llava(LlavaConfig.nano())
    >>> model(to_tensor([[3, 5, 5, 5, 5, 8]]), randn([1, 3, 8, 8])).shape
    paddle.Size([1, 6, 128])
    """

    vision: CLIPVision | SiglipVision
    projector: Projector

    family: Any = architecture("llava", "image_text_to_text")

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__()
        self.config, text = config, config.text
        self.vision = tower_of(config.vision).model(config.vision)
        width = len(config.feature_layers) * config.vision.hidden_size
        self.projector = self.make_projector(config, width)
        self.language = FAMILIES.named(config.family).model.load()(text)

    def make_projector(self, config: Any, width: int) -> Projector:
        """A new map from what is seen, of this width."""
        return Projector(width, config.text.hidden_size, config.activation, config.projector_bias)

    @property
    def vectors_per_image(self) -> int:
        """One for each patch, and with strategy "full" the encoder's first."""
        vision = self.config.vision
        has_first = self.config.strategy == "full" and tower_of(vision).has_class
        return (vision.image_size // vision.patch_size) ** 2 + has_first

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of an image."""
        vision = self.config.vision
        return vision.num_channels, vision.image_size, vision.image_size

    def image_vectors(self, pixel_values: Any) -> Any:
        """What stands in rows for images, [images, vectors_per_image, embed]."""
        config, pixels = self.config, pixel_values.astype(self.language.output_weight.dtype)
        depths = [layer % (config.vision.num_layers + 1) for layer in config.feature_layers]
        features = [self.vision.features(pixels, depth) for depth in depths]
        seen = features[0] if len(features) == 1 else concat(features, axis=-1)
        return self.projector(seen[:, 1:] if config.strategy == "default" else seen)


# as published

_TEXT_DEFAULTS = {"vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
_TEXT_DEFAULTS |= {"num_attention_heads": 32}
_NEWER = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
"""What names in files of newer programs begin with, and what they are by the older names."""


def rename(name: str) -> str:
    """The older name of a weight."""
    newer = next((prefix for prefix in _NEWER if name.startswith(prefix)), None)
    return name if newer is None else _NEWER[newer] + name.removeprefix(newer)


def llava_rules(config: LlavaConfig) -> list[WeightRule]:
    """All the weights."""
    return [
        *language_rules(config.family, config.text, "language_model.", lambda whole: whole.text),
        *tower_of(config.vision).rules("vision_tower.vision_model", "vision"),
        *linear_rules("multi_modal_projector.linear_1", "projector.up"),
        *linear_rules("multi_modal_projector.linear_2", "projector.down"),
    ]


def read_parts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Both parts, the decoder's family and the image token."""
    family, text = read_text_config(config, _TEXT_DEFAULTS)
    said = config.get("vision_config") or {}
    kind = said.get("model_type", "clip_vision_model")
    tower = next((tower for tower in TOWERS if tower.published.model_type == kind), None)
    if tower is None:
        known = " or ".join(tower.published.model_type for tower in TOWERS)
        raise ConfigError(f"config.json of a llava: vision_config is of model_type {kind!r}, and only {known} is read")
    return {
        "text": text,
        "family": family,
        "vision": read_part(tower.config, tower.published, said),
        "image_token": config.get("image_token_index", config.get("image_token_id", 32000)),
    }


def write_parts(config: LlavaConfig) -> dict[str, Any]:
    """The keys that these fields become."""
    return {
        "text_config": write_config(published_text(config.family), config.text),
        "vision_config": write_config(tower_of(config.vision).published, config.vision),
        "image_token_index": config.image_token,
        "image_seq_length": (config.vision.image_size // config.vision.patch_size) ** 2,
        "tie_word_embeddings": config.text.tie_embeddings,
    }


def as_layers(said: int | Sequence[int]) -> tuple[int, ...]:
    """Numbers of blocks, of which config.json may say one alone."""
    return (said,) if isinstance(said, int) else tuple(said)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    return read_parts(config) | {"feature_layers": as_layers(config.get("vision_feature_layer", -2))}


def _write(config: LlavaConfig) -> dict[str, Any]:
    layers = config.feature_layers
    return write_parts(config) | {"vision_feature_layer": layers[0] if len(layers) == 1 else [*layers]}


PART_KEYS = (
    *("text_config", "vision_config", "image_token_index", "image_token_id"),
    *("image_seq_length", "tie_word_embeddings", "ignore_index", "vocab_size"),
)
"""What config.json says of both parts, and what follows from them."""

PUBLISHED_IMAGE_TEXT_TO_TEXT = PublishedFamily(
    architecture="LlavaForConditionalGeneration",
    model_type="llava",
    keys={
        "vision_feature_select_strategy": "strategy",
        "projector_hidden_act": "activation",
        "multimodal_projector_bias": "projector_bias",
    },
    weights=llava_rules,
    defaults={"vision_feature_select_strategy": "default", "projector_hidden_act": "gelu"},
    heads=("language_model.lm_head.",),
    rename=rename,
    read=_read,
    read_keys=(*PART_KEYS, "vision_feature_layer"),
    write=_write,
)
