"""Texts of a form, a token at a time: JSON by a schema, what a regular expression matches, or without some words."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from polyreme.errors import ConfigError
from polyreme.generation.choosing import TokenGrammar
from polyreme.generation.tokenizer import TextTokenizer

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")
_ANY_OBJECT = {"type": "object"}
# a model that may write any white space may go on writing it
_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class TextGrammars:
    """Grammars over the tokens of a tokenizer, for a model with logits of vocab_size ids. May be used in any thread."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._text_tokenizer = tokenizer
        self._lock = threading.Lock()
        self._library: Any = None
        self._tokenizer: Any = None

    def of_schema(self, schema: Mapping[str, Any] | None = None) -> TextGrammar:
        """A grammar of JSON that a schema describes, of any object if None; for one text.

        Raises ConfigError for a schema that is none or uses what is not known, without llguidance, and for a tokenizer
        that it does not read or that has no end of a text.
        """
        wanted = _ANY_OBJECT if schema is None else schema
        grammar = self._of("JSON schema", "grammar_from_json_schema", json.dumps(wanted), overrides=_FORM)
        if not self._may_begin(grammar):
            raise ConfigError("no JSON follows the schema; look for a $ref that leads to itself alone")
        return grammar

    def of_regex(self, pattern: str) -> TextGrammar:
        """A grammar of the texts that a regular expression matches as a whole, in Rust's syntax. Raises as of_schema,
        for an expression that is none."""
        grammar = self._of("regular expression", "grammar_from_regex", pattern)
        if not self._may_begin(grammar):
            raise ConfigError("no text matches the regular expression")
        return grammar

    def of_choice(self, choices: Sequence[str]) -> TextGrammar:
        """A grammar of one of some texts. Raises as of_schema, and for none of them or empty ones."""
        if not choices or not all(choices):
            raise ConfigError("a choice of texts has none, or an empty one; give texts")
        return self.of_regex("|".join(_SPECIAL.sub(r"\\\g<0>", text) for text in choices))

    def _of(self, what: str, reader: str, text: str, **options: Any) -> TextGrammar:
        with self._lock:
            if self._tokenizer is None:
                self._start()
        try:
            form = getattr(self._library.LLMatcher, reader)(text, **options)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the {what} is not understood: {error}") from None
        matcher = self._library.LLMatcher(self._tokenizer, form, log_level=0)
        if matcher.is_error():
            raise ConfigError(f"the {what} is not understood: {_first_line(matcher.get_error())}")
        return TextGrammar(matcher, self.vocab_size)

    def _may_begin(self, grammar: TextGrammar) -> bool:
        begins = set(np.flatnonzero(grammar.allowed()).tolist()) - set(self._text_tokenizer.end)
        return bool(begins) or grammar.is_accepting

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


class TextGrammar:
    """A text on its way, as TokenGrammar."""

    group_start = None

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    @property
    def is_done(self) -> bool:
        """Whether the text is whole, and nothing can follow."""
        return self._matcher.is_stopped()

    @property
    def is_accepting(self) -> bool:
        """Whether the text is whole, and more may follow."""
        return self._matcher.is_accepting()

    def allowed(self) -> np.ndarray:
        """The tokens that may come next, bool [vocab]."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(words, bitorder="little")[: self._vocab_size].astype(bool)
        return np.pad(bits, (0, self._vocab_size - len(bits)))

    def take(self, token: int) -> None:
        """Go on by a token of those."""
        self._matcher.consume_token(token)

    def copy(self) -> TextGrammar:
        """The same for another text, from here on."""
        return TextGrammar(self._matcher.deep_copy(), self._vocab_size)


class WordFilter:
    """Any text, or what another grammar allows, without some words, as TokenGrammar.

    words: token ids that may not come one after another: the last of them is refused where the others stand before it.
    """

    def __init__(self, words: Sequence[Sequence[int]], vocab_size: int, grammar: TokenGrammar | None = None) -> None:
        self._words, self._vocab_size, self._grammar = [list(word) for word in words], vocab_size, grammar
        self.group_start = None if grammar is None else grammar.group_start
        self._longest = max(map(len, self._words), default=0)
        self._text: list[int] = []

    @property
    def is_done(self) -> bool:
        """Whether the other grammar's text is whole."""
        return self._grammar is not None and self._grammar.is_done

    def allowed(self) -> np.ndarray:
        """The tokens that may come next, bool [vocab]; all of the other grammar's, where no other one is left."""
        allowed = np.ones(self._vocab_size, bool) if self._grammar is None else self._grammar.allowed()
        left = allowed.copy()
        for word in self._words:
            before = len(word) - 1
            if before <= len(self._text) and self._text[len(self._text) - before :] == word[:-1]:
                left[word[-1]] = False
        return left if left.any() else allowed

    def take(self, token: int) -> None:
        """Go on by a token of those."""
        self._text = [*self._text, token][-self._longest :]
        if self._grammar is not None:
            self._grammar.take(token)

    def copy(self) -> WordFilter:
        """The same for another text, from here on."""
        other = WordFilter(self._words, self._vocab_size, None if self._grammar is None else self._grammar.copy())
        other._text = list(self._text)
        return other


def without_words(
    words: Sequence[str], tokenizer: TextTokenizer, vocab_size: int, grammar: TokenGrammar | None = None
) -> TokenGrammar | None:
    """A WordFilter of words, as the tokenizer writes them at a text's beginning and behind a space; the grammar itself
    without any. Raises ConfigError for a word of no tokens."""
    if not words:
        return grammar
    written = [tokenizer.encode(text, add_special_tokens=False) for word in words for text in (word, f" {word}")]
    if not all(written):
        raise ConfigError("bad_words: a word has no tokens; leave it out")
    return WordFilter(written, vocab_size, grammar)


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0][:300]
