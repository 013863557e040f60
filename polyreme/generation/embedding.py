"""Texts as vectors, and scores of pairs of texts: what an encoder gives of a few texts at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.generation.tokenizer import AutoTokenizer, TextTokenizer
from polyreme.jit import to_static
from polyreme.models.auto import AutoModel, AutoModelForSequenceClassification
from polyreme.models.encoders.bert import Bert, BertForSequenceClassification
from polyreme.models.encoders.modernbert import ModernBert, ModernBertForSequenceClassification
from polyreme.models.files.folder import read_json, read_json_list
from polyreme.nn import functional as F

_ROWS = 4
"""Texts that are computed at once, always: a text's vector is the same bits alone and beside others."""
_LEAST_LENGTH = 16
_POOLINGS = ("mean", "cls")
_ACTIVATIONS = ("sigmoid", "identity")


class TextEncoder:
    """An encoder in evaluation mode, which gives a row of numbers for each text: the same bits alone and beside others.

    max_tokens: of a text, those around it included. width: numbers of a row. A class sets `_run`, of ids, mask and
    types [_ROWS, room] -> [_ROWS, width].
    """

    model: Any
    tokenizer: TextTokenizer
    max_tokens: int
    width: int
    _run: Callable[..., Any]

    def __init__(self, model: Any, tokenizer: TextTokenizer, max_tokens: int | None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.max_tokens = min(max_tokens or model.config.seq_len, model.config.seq_len)
        # files may say that texts are cut and padded, which is done here, and not in silence
        tokenizer.tokenizer.no_truncation()
        tokenizer.tokenizer.no_padding()
        model.eval()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with what the model expects around it."""
        return self.tokenizer.encode(text)

    def compute(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> np.ndarray:
        """Rows of token ids, float32 [texts, width]; types: of the tokens, 0 if None. Raises ConfigError for no tokens
        and for too many."""
        for number, ids in enumerate(texts):
            if not 0 < len(ids) <= self.max_tokens:
                raise ConfigError(f"text {number} has {len(ids)} tokens; give 1 to {self.max_tokens}")
        rows = np.empty((len(texts), self.width), np.float32)
        rooms: dict[int, list[int]] = {}
        for number, ids in enumerate(texts):
            rooms.setdefault(self._room(len(ids)), []).append(number)
        for room, numbers in rooms.items():
            for start in range(0, len(numbers), _ROWS):
                group = numbers[start : start + _ROWS]
                parts = [texts[number] for number in group], [types[number] for number in group] if types else []
                rows[group] = self._batch(*parts, room)[: len(group)]
        return rows

    def _room(self, length: int) -> int:
        room = _LEAST_LENGTH
        while room < length:
            room *= 2
        return min(room, self.model.config.seq_len)

    def _batch(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]], room: int) -> np.ndarray:
        ids, mask, kinds = (np.zeros((_ROWS, room), np.int64) for _ in range(3))
        mask[:, 0] = 1  # rows without a text see something, so that nothing is divided by zero
        for row, text in enumerate(texts):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        for row, kind in enumerate(types):
            kinds[row, : len(kind)] = kind
        with no_grad():
            return self._run(*map(to_tensor, (ids, mask, kinds))).numpy()


class TextScorer(TextEncoder):
    """Scores of pairs of texts, a query and a document, by a classifier with one label: a BERT, one of its kin or a
    ModernBERT, which reads both together.

    activation: "sigmoid" of the label's score, or "identity". Raises ConfigError for another model or activation.
    """

    model: BertForSequenceClassification | ModernBertForSequenceClassification
    width = 1

    def __init__(
        self, model: Any, tokenizer: TextTokenizer, *, activation: str = "sigmoid", max_tokens: int | None = None
    ) -> None:
        is_known = isinstance(model, (BertForSequenceClassification, ModernBertForSequenceClassification))
        if not is_known or model.config.num_labels != 1:
            raise ConfigError(
                f"TextScorer: {type(model).__name__} is no classifier of BERT's kin with one label; give one"
            )
        if activation not in _ACTIVATIONS:
            raise ConfigError(f"TextScorer: activation={activation!r}; give {' or '.join(map(repr, _ACTIVATIONS))}")
        super().__init__(model, tokenizer, max_tokens)
        self.activation = activation
        self._run = to_static(self._scores)

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, dtype: Any = None) -> TextScorer:
        """A scorer of published weights, with the activation that sentence-transformers' keys of config.json say; a
        sigmoid without them. Raises as AutoModelForSequenceClassification, ConfigError for another activation."""
        folder = Path(folder)
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype)
        config = read_json(folder / "config.json")
        said = (config.get("sentence_transformers") or {}).get("activation_fn")
        said = said or config.get("sbert_ce_default_activation_function") or "Sigmoid"
        return cls(model, AutoTokenizer.from_pretrained(folder), activation=str(said).rsplit(".", 1)[-1].lower())

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Ids of two texts as the model reads them together, and the types of the tokens."""
        encoded = self.tokenizer.tokenizer.encode(first, second)
        return encoded.ids, encoded.type_ids

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> np.ndarray:
        """Scores of what encode_pair gave, float32 [pairs]. Raises ConfigError for pairs of too many tokens."""
        return self.compute([ids for ids, _ in pairs], [types for _, types in pairs])[:, 0]

    def _scores(self, ids: Any, mask: Any, types: Any) -> Any:
        more = {"token_type_ids": types} if getattr(self.model.config, "num_token_types", 0) > 1 else {}
        scores = self.model(ids, attention_mask=mask, **more).astype("float32")
        return F.sigmoid(scores) if self.activation == "sigmoid" else scores


class TextEmbedder(TextEncoder):
    """Vectors of texts by a BERT, one of its kin or a ModernBERT, which is put into evaluation mode.

    pooling: "mean" of the places, or "cls", the first one. normalize: vectors are of length 1. max_tokens: of a text,
    those around it included; the model's positions if None. Raises ConfigError for another model or pooling.
    """

    model: Bert | ModernBert
    normalize: bool

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
        super().__init__(model, tokenizer, max_tokens)
        self.width, self.pooling, self.normalize = model.config.hidden_size, pooling, normalize
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

    def embed(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Vectors of token ids, float32 [texts, width]. Raises ConfigError for no tokens and for too many."""
        return self.compute(texts)

    def _pooled(self, ids: Any, mask: Any, types: Any) -> Any:
        hidden = self.model.encode(ids, attention_mask=mask).astype("float32")
        if self.pooling == "cls":
            vectors = hidden[:, 0]
        else:
            weights = mask.astype("float32").unsqueeze(-1)
            vectors = (hidden * weights).sum(1) / weights.sum(1)
        return F.normalize(vectors, axis=-1) if self.normalize else vectors


def _json(path: Path, otherwise: dict[str, Any]) -> dict[str, Any]:
    return read_json(path) if path.is_file() else otherwise
