"""Texts as vectors: an encoder's outputs, put together over the places of a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.generation.tokenizer import AutoTokenizer, TextTokenizer
from polyreme.jit import to_static
from polyreme.models.auto import AutoModel
from polyreme.models.encoders.bert import Bert
from polyreme.models.encoders.modernbert import ModernBert
from polyreme.models.files.folder import read_json, read_json_list
from polyreme.nn import functional as F

_ROWS = 4
"""Texts that are computed at once, always: a text's vector is the same bits alone and beside others."""
_LEAST_LENGTH = 16
_POOLINGS = ("mean", "cls")


class TextEmbedder:
    """Vectors of texts by a BERT, one of its kin or a ModernBERT, which is put into evaluation mode.

    pooling: "mean" of the places, or "cls", the first one. normalize: vectors are of length 1. max_tokens: of a text,
    those around it included; the model's positions if None. Raises ConfigError for another model or pooling.
    """

    model: Bert | ModernBert
    tokenizer: TextTokenizer
    normalize: bool
    max_tokens: int

    def __init__(
        self,
        model: Any,
        tokenizer: TextTokenizer,
        *,
        pooling: str = "mean",
        normalize: bool = True,
        max_tokens: int | None = None,
    ) -> None:
        if not isinstance(model, (Bert, ModernBert)):
            raise ConfigError(f"TextEmbedder: {type(model).__name__} is no BERT, and none of its kin; give one")
        if pooling not in _POOLINGS:
            raise ConfigError(f"TextEmbedder: pooling={pooling!r}; give {' or '.join(map(repr, _POOLINGS))}")
        self.model, self.tokenizer, self.pooling, self.normalize = model, tokenizer, pooling, normalize
        self.max_tokens = min(max_tokens or model.config.seq_len, model.config.seq_len)
        # files may say that texts are cut and padded, which is done here, and not in silence
        tokenizer.tokenizer.no_truncation()
        tokenizer.tokenizer.no_padding()
        model.eval()
        self._run = to_static(self._pooled)

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, dtype: Any = None) -> TextEmbedder:
        """An embedder of published weights, with the pooling that sentence-transformers' files beside them say: the
        mean, of length 1, without such files. Raises as AutoModel, ConfigError for a pooling that is not there."""
        folder = Path(folder)
        model = AutoModel.from_pretrained(folder, dtype=dtype)
        parts = folder / "modules.json"
        modules = read_json_list(parts) if parts.is_file() else []
        pooling = _json(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
        modes = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value is True]
        known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
        if len(modes) != 1 or modes[0] not in known:
            raise ConfigError(f"{folder}: pooling by {modes}; one of {', '.join(known)} is done")
        kinds = [
            str(module.get("type") if isinstance(module, dict) else module).rsplit(".", 1)[-1] for module in modules
        ]
        unknown = set(kinds) - {"Transformer", "Pooling", "Normalize"}
        if unknown:
            raise ConfigError(f"{folder}: modules.json has {sorted(unknown)[0]!r}, which is not done")
        return cls(
            model,
            AutoTokenizer.from_pretrained(folder),
            pooling=known[modes[0]],
            normalize="Normalize" in kinds or not modules,
            max_tokens=_json(folder / "sentence_bert_config.json", {}).get("max_seq_length"),
        )

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self.model.config.hidden_size

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with what the model expects around it."""
        return self.tokenizer.encode(text)

    def embed(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Vectors of token ids, float32 [texts, width]. Raises ConfigError for no tokens and for too many."""
        for number, ids in enumerate(texts):
            if not 0 < len(ids) <= self.max_tokens:
                raise ConfigError(f"text {number} has {len(ids)} tokens; give 1 to {self.max_tokens}")
        vectors = np.empty((len(texts), self.width), np.float32)
        rooms: dict[int, list[int]] = {}
        for number, ids in enumerate(texts):
            rooms.setdefault(self._room(len(ids)), []).append(number)
        for room, numbers in rooms.items():
            for start in range(0, len(numbers), _ROWS):
                group = numbers[start : start + _ROWS]
                vectors[group] = self._batch([texts[number] for number in group], room)[: len(group)]
        return vectors

    def _room(self, length: int) -> int:
        room = _LEAST_LENGTH
        while room < length:
            room *= 2
        return min(room, self.model.config.seq_len)

    def _batch(self, texts: Sequence[Sequence[int]], room: int) -> np.ndarray:
        ids = np.zeros((_ROWS, room), np.int64)
        mask = np.zeros((_ROWS, room), np.int64)
        mask[:, 0] = 1  # rows without a text see something, so that nothing is divided by zero
        for row, text in enumerate(texts):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        with no_grad():
            return self._run(to_tensor(ids), to_tensor(mask)).numpy()

    def _pooled(self, ids: Any, mask: Any) -> Any:
        hidden = self.model.encode(ids, attention_mask=mask).astype("float32")
        if self.pooling == "cls":
            vectors = hidden[:, 0]
        else:
            weights = mask.astype("float32").unsqueeze(-1)
            vectors = (hidden * weights).sum(1) / weights.sum(1)
        return F.normalize(vectors, axis=-1) if self.normalize else vectors


def _json(path: Path, otherwise: dict[str, Any]) -> dict[str, Any]:
    return read_json(path) if path.is_file() else otherwise
