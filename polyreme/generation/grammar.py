"""Texts of a form that was asked for: JSON, or JSON by a schema, a token at a time."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np

from polyreme.errors import ConfigError
from polyreme.generation.tokenizer import TextTokenizer

_ANY_OBJECT = {"type": "object"}
# a model that may write any white space may go on writing it
_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class JsonGrammars:
    """Grammars over the tokens of a tokenizer, for a model with logits of vocab_size ids. May be used in any thread."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._text_tokenizer = tokenizer
        self._lock = threading.Lock()
        self._library: Any = None
        self._tokenizer: Any = None

    def of_schema(self, schema: Mapping[str, Any] | None = None) -> JsonGrammar:
        """A grammar of JSON that a schema describes, of any object if None; for one text.

        Raises ConfigError for a schema that is none or uses what is not known, without llguidance, and for a tokenizer
        that it does not read or that has no end of a text.
        """
        with self._lock:
            if self._tokenizer is None:
                self._start()
        wanted = _ANY_OBJECT if schema is None else schema
        try:
            form = self._library.LLMatcher.grammar_from_json_schema(json.dumps(wanted), overrides=_FORM)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the JSON schema is not understood: {error}") from None
        matcher = self._library.LLMatcher(self._tokenizer, form, log_level=0)
        if matcher.is_error():
            raise ConfigError(f"the JSON schema is not understood: {_first_line(matcher.get_error())}")
        grammar = JsonGrammar(matcher, self.vocab_size)
        begins = set(np.flatnonzero(grammar.allowed()).tolist()) - set(self._text_tokenizer.end)
        if not begins and not matcher.is_accepting():
            raise ConfigError("no JSON follows the schema; look for a $ref that leads to itself alone")
        return grammar

    def _start(self) -> None:
        try:
            self._library = import_module("llguidance")
        except ImportError:
            raise ConfigError("JSON by a schema needs llguidance: pip install polyreme[serve]") from None
        end = list(self._text_tokenizer.end)
        if not end:
            raise ConfigError("JSON by a schema needs a tokenizer with an end of a text, eos_token")
        text = self._text_tokenizer.tokenizer.to_str()
        try:
            self._tokenizer = self._library.LLTokenizer(text, n_vocab=self.vocab_size, eos_token=end)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"JSON by a schema does not work with this tokenizer: {_first_line(str(error))}"
            ) from None


class JsonGrammar:
    """A text on its way, as TokenGrammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    @property
    def is_done(self) -> bool:
        """Whether the text is whole, and nothing can follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> np.ndarray:
        """The tokens that may come next, bool [vocab]."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(words, bitorder="little")[: self._vocab_size].astype(bool)
        return np.pad(bits, (0, self._vocab_size - len(bits)))

    def take(self, token: int) -> None:
        """Go on by a token of those."""
        self._matcher.consume_token(token)

    def copy(self) -> JsonGrammar:
        """The same for another text, from here on."""
        return JsonGrammar(self._matcher.deep_copy(), self._vocab_size)


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0][:300]
