"""Prompts with images: pixels as a folder says that its model takes them, and vectors in the places of tokens."""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, ConfigError, DataError
from polyreme.generation.prompt_vectors import PromptVectors
from polyreme.jit import to_static
from polyreme.models.files.folder import read_json
from polyreme.models.parts.image_text import ImageTextModel
from polyreme.vision.image import as_pixels, decoded, is_pillow, pillow, upright

MOST_IMAGES = 16
"""Of one prompt."""
MOST_PIXELS = 1 << 24
"""Of an image in a URL, whose bytes say little of what it takes."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_PREPROCESSOR, _PROCESSOR = "preprocessor_config.json", "processor_config.json"
_READ = (
    *("do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor"),
    *("do_normalize", "image_mean", "image_std"),
)
# of which program makes the pixels; images are turned to RGB anyway
_WITHOUT_EFFECT = (
    *("image_processor_type", "feature_extractor_type", "processor_class", "_valid_processor_keys", "auto_map"),
    *("data_format", "input_data_format", "device", "return_tensors", "do_convert_rgb", "default_to_square"),
)


@dataclass(frozen=True)
class ImageProcessor:
    """How an image becomes what a model takes, as the image processors of CLIP and SigLIP do it.

    size: (height, width) that it is resized to, or the length of its shorter side; not resized if None. crop: (height,
    width) of the part in the middle that is left, padded by black where there is less; all if None. resample: Pillow's
    number of a filter. scale: what bytes are multiplied by. mean, std: of each channel, taken away and divided by.
    """

    size: tuple[int, int] | int | None = 224
    crop: tuple[int, int] | None = (224, 224)
    resample: int = 3
    scale: float = 1 / 255
    mean: Sequence[float] = (0.48145466, 0.4578275, 0.40821073)
    std: Sequence[float] = (0.26862954, 0.26130258, 0.27577711)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> ImageProcessor:
        """The one that preprocessor_config.json of a folder describes, or processor_config.json. Raises CheckpointError
        for a folder without them, ConfigError for steps that are not done here."""
        folder = Path(folder)
        file = next((folder / name for name in (_PREPROCESSOR, _PROCESSOR) if (folder / name).is_file()), None)
        if file is None:
            raise CheckpointError(f"{folder}: no {_PREPROCESSOR}, which says how images are resized and normed")
        said = read_json(file)
        return cls.from_dict(said.get("image_processor") or said, str(file))

    @classmethod
    def from_dict(cls, said: Mapping[str, Any], where: str = "image processor") -> ImageProcessor:
        """The one that such a file describes; where: its name, for errors."""
        known = {*_WITHOUT_EFFECT, *_READ}
        for name, value in said.items():
            if name not in known and value not in (None, False, {}, []):
                raise ConfigError(
                    f"{where}: {name}={value!r:.60} is not done here; images are resized, cropped and normed"
                )
        try:
            fields: dict[str, Any] = {"resample": int(said.get("resample", 3))}
            fields["size"] = _sides(said["size"]) if said.get("do_resize", True) else None
            crop = _sides(said["crop_size"]) if said.get("do_center_crop") else None
            fields["crop"] = (crop, crop) if isinstance(crop, int) else crop
            fields["scale"] = float(said.get("rescale_factor", 1 / 255)) if said.get("do_rescale", True) else 1.0
            is_normed = said.get("do_normalize", True)
            fields["mean"] = tuple(map(float, said["image_mean"])) if is_normed else (0.0,) * 3
            fields["std"] = tuple(map(float, said["image_std"])) if is_normed else (1.0,) * 3
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{where}: {type(error).__name__}: {error}; give size, image_mean, image_std") from None
        return cls(**fields)

    def __call__(self, image: Any) -> np.ndarray:
        """float32 [3, height, width] of a Pillow image or of pixels, uint8 [height, width, channels]."""
        library = pillow()
        picture = image if is_pillow(image) else library.fromarray(_bytes_of(image))
        picture = picture.convert("RGB")
        if self.size is not None:
            height, width = self.size if isinstance(self.size, tuple) else _with_short_side(picture.size, self.size)
            picture = picture.resize((width, height), resample=self.resample)
        pixels = np.asarray(picture)
        if self.crop is not None:
            pixels = _middle(pixels, *self.crop)
        mean, std = (np.asarray(part, np.float32) for part in (self.mean, self.std))
        normed = (pixels * np.float32(self.scale) - mean) / std
        return normed.astype(np.float32).transpose(2, 0, 1)


class ImagePrompts:
    """Prompts with images for an ImageTextModel: token ids with as many places for each image as it takes, and the
    vectors that stand there. May be used in any thread."""

    model: ImageTextModel
    processor: ImageProcessor

    def __init__(self, model: ImageTextModel, processor: ImageProcessor) -> None:
        self.model, self.processor = model, processor
        self._see = to_static(model.image_vectors)
        self._in_turn = threading.Lock()

    def expand(self, ids: Sequence[int], images: Sequence[Any]) -> tuple[list[int], PromptVectors | None]:
        """Ids in which each image token stands as often as an image has vectors, and those of these images, in order:
        Pillow images, pixels or data: URLs. Raises ConfigError for another number of images than of image tokens, and
        for too many; DataError for what is no image."""
        token, count = self.model.config.image_token, self.model.vectors_per_image
        places = [number for number, own in enumerate(ids) if own == token]
        if len(places) != len(images):
            raise ConfigError(
                f"{len(images)} images, and the prompt has the image token {len(places)} times; give one for each"
            )
        if len(images) > MOST_IMAGES:
            raise ConfigError(f"{len(images)} images in one prompt; give at most {MOST_IMAGES}")
        if not images:
            return [*ids], None
        expanded = [own for one in ids for own in [one] * (count if one == token else 1)]
        vectors = [self._vectors_of(read_url(image) if isinstance(image, str) else image) for image in images]
        where = np.flatnonzero(np.asarray(expanded) == token)
        return expanded, PromptVectors(where, np.concatenate(vectors))

    def _vectors_of(self, image: Any) -> np.ndarray:
        """float32 [vectors_per_image, embed] of one image, by a program that all share."""
        pixels = self.processor(image)
        if pixels.shape != self.model.image_shape:
            raise ConfigError(
                f"the image processor makes {list(pixels.shape)} of an image, and the model takes "
                f"{[*self.model.image_shape]}; give the processor of its folder"
            )
        with self._in_turn, no_grad():
            return self._see(to_tensor(pixels[None])).astype("float32").numpy()[0]


def parts_of_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """A conversation as templates of models read it that take images, with content in parts, and its images: of parts
    {"type": "image_url", "image_url": {"url": ...}} and {"type": "image", "image": ...}. Raises ConfigError for other
    parts."""
    read, images = [], []
    for message in messages:
        content = message.get("content") or ""
        parts: list[dict[str, Any]] = []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            kind = part.get("type")
            if kind == "text":
                parts.append({"type": "text", "text": part["text"]})
                continue
            image = part.get(kind) if kind in ("image", "image_url") else None
            image = image.get("url") if isinstance(image, Mapping) else image
            if image is None:
                raise ConfigError(f"a part of content with {sorted(part)}; give its type, text, image_url or image")
            parts.append({"type": "image"})
            images.append(image)
        read.append({**message, "content": parts})
    return read, images


def read_url(url: str) -> Any:
    """The Pillow image in a data: URL, "data:image/png;base64,...". Raises ConfigError for other URLs, of which nothing
    is fetched, DataError for bytes that are no image and for more than MOST_PIXELS."""
    head, comma, text = url.partition(",")
    if not head.startswith("data:image/") or not comma or not head.endswith(";base64"):
        raise ConfigError(f"an image at {url[:40]!r}; give data:image/png;base64,..., as nothing is fetched")
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise DataError(f"an image in a data: URL is not base64: {error}") from None
    return upright(decoded(raw, *_FORMATS, most_pixels=MOST_PIXELS))


def read_image(path: Path) -> Any:
    """The Pillow image in a file. Raises ConfigError for one that cannot be read, DataError for bytes that are no image
    and for more than MOST_PIXELS."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the file of an image") from None
    return upright(decoded(raw, *_FORMATS, most_pixels=MOST_PIXELS))


def _sides(said: Any) -> tuple[int, int] | int:
    """(height, width), or the length of the shorter side."""
    if not isinstance(said, Mapping):
        return int(said)
    if "shortest_edge" in said:
        return int(said["shortest_edge"])
    return int(said["height"]), int(said["width"])


def _with_short_side(size: tuple[int, int], short: int) -> tuple[int, int]:
    """(height, width) of an image of (width, height) whose shorter side becomes so long."""
    width, height = size
    if width <= height:
        return int(short * height / width), short
    return short, int(short * width / height)


def _middle(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The part [height, width, channels] in the middle, black where there is less."""
    missing = [max(0, want - have) for want, have in zip((height, width), pixels.shape, strict=False)]
    if any(missing):
        # half of what is missing goes before, the larger half, as the reference has it
        around = [(-(-gap // 2), gap // 2) for gap in missing]
        pixels = np.pad(pixels, [*around, (0, 0)])
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]


def _bytes_of(image: Any) -> np.ndarray:
    pixels = as_pixels(image, "image")
    if pixels.dtype != np.uint8:
        raise ConfigError(f"an image has pixels in {pixels.dtype}; give uint8, 0 to 255")
    return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
