"""Text to token ids and back, and conversations to text by the template that a model was trained with."""

from __future__ import annotations

import datetime
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, ConfigError
from polyreme.models.files.folder import read_json, write_json
from polyreme.models.files.gguf_file import gguf_fields, is_gguf
from polyreme.models.files.packages import resolve

_TEMPLATE_CHARS = 1 << 20
_LONG_CHARS = 1 << 14
_TEXT_CHARS = 1 << 24
_TEMPLATE_SECONDS = 1.0
# how texts are cut before merges, by the name that a GGUF file has for it; facts of the models' own tokenizers
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CUTS = {"llama-bpe": _LETTERS + "{1,3}" + _OTHERS, "llama3": _LETTERS + "{1,3}" + _OTHERS, "qwen2": _LETTERS + _OTHERS}
_BY_DIGITS = ("smollm", "starcoder", "refact", "command-r")
_NO_LIMIT = 10**12  # what larger numbers of model_max_length say
_CUTTINGS = (*_CUTS, *_BY_DIGITS, "gpt-2")
"""Names in GGUF files of how texts are cut, of equal ones the first."""


class TextTokenizer:
    """A tokenizers.Tokenizer with what a model's folder says besides.

    end: ids that end a text. bos: the id before every text, if there is one. template: of conversations, in jinja2.
    padding_side: where rows of a batch are filled up, "right" or "left". model_max_length: tokens that a text is cut to
    where `truncation` says no other number; None for no limit.
    """

    tokenizer: Tokenizer
    end: tuple[int, ...]
    bos: int | None
    template: str | None
    padding_side: str
    model_max_length: int | None

    def __init__(
        self,
        tokenizer: Tokenizer,
        end: Sequence[int] = (),
        bos: int | None = None,
        template: str | None = None,
        special: Mapping[str, str] | None = None,
        padding_side: str = "right",
        model_max_length: int | None = None,
    ) -> None:
        self.tokenizer, self.end, self.bos, self.template = tokenizer, tuple(end), bos, template
        self._special = dict(special or {})
        self.padding_side, self.model_max_length = padding_side, model_max_length
        self._in_turn = threading.Lock()  # texts are cut by a setting of the tokenizer

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: str | Sequence[str] | None = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_token_type_ids: bool | None = None,
        padding_side: str | None = None,
    ) -> dict[str, Any]:
        """Ids of a text, or of each of several, with what a model is called by, as tokenizers of transformers and
        PaddleNLP give them: input_ids, attention_mask and, of pairs or where asked, token_type_ids.

        text_pair: a second text of each. padding: True or "longest" for rows as long as the longest one, "max_length"
        for max_length. truncation: whether texts are cut to max_length, model_max_length if None; of a pair the longer
        text first. return_tensors: None for lists, "np" for NumPy arrays, "pd" (or "pt") for Tensors, [batch, seq].

        Raises ConfigError for what is none of these, for padding without a pad_token, for tensors of rows of several
        lengths.

        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> words = Tokenizer(models.WordLevel({"[UNK]": 0, "to": 1, "be": 2}, "[UNK]"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = TextTokenizer(words, special={"pad_token": "[UNK]"}, padding_side="left")
        >>> tokenizer(["to be", "be"], padding=True)
        {'input_ids': [[1, 2], [0, 2]], 'attention_mask': [[1, 1], [0, 1]]}
        """
        is_one = isinstance(text, str)
        texts, pairs = ([text], [text_pair]) if is_one else (list(text), text_pair)
        if pairs is not None and (isinstance(pairs, str) or len(pairs) != len(texts)):
            raise ConfigError(f"tokenizer: {len(texts)} texts and a text_pair of another number; give one for each")
        inputs = texts if pairs is None or pairs == [None] else list(zip(texts, pairs, strict=True))
        limit = max_length if max_length is not None else self.model_max_length
        with self._in_turn:
            self._set_truncation(truncation, limit)
            try:
                encoded = self.tokenizer.encode_batch(inputs, add_special_tokens=add_special_tokens)
            finally:
                self.tokenizer.no_truncation()
        rows: dict[str, list[list[int]]] = {"input_ids": [], "token_type_ids": [], "attention_mask": []}
        for one in encoded:
            first = [self.bos] if add_special_tokens and self.bos is not None and one.ids[:1] != [self.bos] else []
            rows["input_ids"].append([*first, *one.ids])
            rows["token_type_ids"].append([*([0] * len(first)), *one.type_ids])
            rows["attention_mask"].append([1] * (len(first) + len(one.ids)))
        if not (return_token_type_ids or (return_token_type_ids is None and inputs is not texts)):
            del rows["token_type_ids"]
        if padding not in (False, "do_not_pad"):
            self._pad(rows, padding, limit, padding_side or self.padding_side)
        if return_tensors is None:
            return {name: row[0] for name, row in rows.items()} if is_one else dict(rows)
        return {name: _as_tensor(row, return_tensors) for name, row in rows.items()}

    def _set_truncation(self, truncation: bool | str, limit: int | None) -> None:
        if truncation in (False, "do_not_truncate"):
            self.tokenizer.no_truncation()
            return
        ways = {True: "longest_first", "longest_first": "longest_first"}
        ways |= {"only_first": "only_first", "only_second": "only_second"}
        if truncation not in ways or limit is None:
            raise ConfigError(
                f"tokenizer: truncation={truncation!r} with max_length={limit}; give one of True, longest_first, "
                "only_first, only_second, and a max_length"
            )
        room = limit - (self.bos is not None)
        self.tokenizer.enable_truncation(room, strategy=ways[truncation])

    def _pad(self, rows: dict[str, list[list[int]]], padding: bool | str, limit: int | None, side: str) -> None:
        """Fill up rows to one length."""
        if padding not in (True, "longest", "max_length") or side not in ("left", "right"):
            raise ConfigError(
                f"tokenizer: padding={padding!r} on the side {side!r}; give True, longest or max_length, left or right"
            )
        if padding == "max_length" and limit is None:
            raise ConfigError("tokenizer: padding='max_length' without a max_length; give one")
        number = self.pad_token_id
        if number is None:
            raise ConfigError("tokenizer: padding without a pad_token; set tokenizer.pad_token, as to its eos_token")
        length = max(map(len, rows["input_ids"])) if padding != "max_length" else limit
        for name, fill in (("input_ids", number), ("token_type_ids", 0), ("attention_mask", 0)):
            for place, row in enumerate(rows.get(name, ())):
                more = [fill] * (length - len(row))  # type: ignore[operator]  # which max_length says
                rows[name][place] = [*more, *row] if side == "left" else [*row, *more]

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included."""
        return self.tokenizer.get_vocab_size()

    @property
    def special_tokens(self) -> dict[str, str]:
        """What the folder calls bos_token, eos_token, pad_token and unk_token, those that it names."""
        return dict(self._special)

    @property
    def bos_token_id(self) -> int | None:
        """The id of what the folder calls bos_token, whether or not it is put before a text."""
        return _id(self.tokenizer, self._special.get("bos_token"))

    @property
    def eos_token_id(self) -> int | None:
        """The id of what the folder calls eos_token; without that the first that ends a text."""
        named = _id(self.tokenizer, self._special.get("eos_token"))
        return named if named is not None else next(iter(self.end), None)

    @property
    def eos_token(self) -> str | None:
        """The token of eos_token_id."""
        number = self.eos_token_id
        return None if number is None else self.tokenizer.id_to_token(number)

    @property
    def bos_token(self) -> str | None:
        """What the folder calls so."""
        return self._special.get("bos_token")

    @property
    def unk_token(self) -> str | None:
        """What the folder calls so."""
        return self._special.get("unk_token")

    @property
    def pad_token(self) -> str | None:
        """What rows are filled up with, as the folder says or as it is set. ConfigError for what is no token."""
        return self._special.get("pad_token")

    @pad_token.setter
    def pad_token(self, token: str | None) -> None:
        if token is None or self.tokenizer.token_to_id(token) is None:
            raise ConfigError(f"pad_token: {token!r} is no token of this tokenizer; give one, as its eos_token")
        self._special["pad_token"] = token

    @property
    def pad_token_id(self) -> int | None:
        """The id of pad_token."""
        return _id(self.tokenizer, self.pad_token)

    def get_vocab(self) -> dict[str, int]:
        """Ids by token, added ones included."""
        return self.tokenizer.get_vocab()

    def tokenize(self, text: str) -> list[str]:
        """The tokens of a text, without what stands around one."""
        return self.tokenizer.encode(text, add_special_tokens=False).tokens

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or those of several; that of unk_token, or None, for what is no token."""
        if isinstance(tokens, str):
            number = self.tokenizer.token_to_id(tokens)
            return _id(self.tokenizer, self.unk_token) if number is None else number
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """The token of an id, or those of several; None for what is no id of a token."""
        if isinstance(ids, Integral):
            return self.tokenizer.id_to_token(int(ids))
        return [self.tokenizer.id_to_token(int(number)) for number in ids]

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of special tokens, which stand for no text."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; with what the model expects around one, unless add_special_tokens is False."""
        if len(text) > _LONG_CHARS:
            # a batch lets other threads of Python run meanwhile
            (encoded,) = self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        else:
            encoded = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids = encoded.ids
        return [self.bos, *ids] if add_special_tokens and self.bos is not None and ids[:1] != [self.bos] else ids

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        """The text of ids, a sequence of them or an array [seq]."""
        ids = ids.numpy() if hasattr(ids, "numpy") else ids
        return self.tokenizer.decode(np.atleast_1d(np.asarray(ids, np.int64)).tolist(), skip_special_tokens)

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:
        """The text of each row of ids."""
        return [self.decode(row, skip_special_tokens) for row in rows]

    def check_same_tokens(self, other: TextTokenizer, name: Any) -> None:
        """Raises ConfigError, which says `name` of this one, where the other one's tokens have other ids."""
        if self.tokenizer.get_vocab() != other.tokenizer.get_vocab():
            raise ConfigError(f"{name}: its tokens are not the model's; draft with a model of the same tokenizer")

    def apply_chat_template(
        self, /, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation, [{"role": ..., "content": ...}, ...], which encode(..., False) takes.

        add_generation_prompt: ends where the answer begins. variables: others that the template reads. The template
        runs in jinja2's sandbox. Raises ConfigError for a model without one, without jinja2, and where it fails.
        """
        if self.template is None:
            raise ConfigError(
                "the tokenizer has no chat template; give text, a model trained to chat, or in a configuration of "
                "fine-tuning template: roles, chatml, another name or a .jinja file"
            )
        given = {**self._special, **variables, "messages": [dict(message) for message in messages]}
        return _render(self.template, given | {"add_generation_prompt": add_generation_prompt})

    def encode_chat(
        self, /, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of a conversation as its template writes it, in training and in serving; the template alone says what
        stands before it. Raises as apply_chat_template does."""
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)

    def with_template(self, template: str, end: str | None = None) -> TextTokenizer:
        """This tokenizer with another chat template. end: the token that closes answers, which then ends a text too;
        None for those that do already. Raises ConfigError for an end that is no token."""
        ends = list(self.end)
        if end is not None:
            number = self.tokenizer.token_to_id(end)
            if number is None:
                raise ConfigError(
                    f"the chat template closes answers with {end}, which is no token of this tokenizer; take another "
                    "template, such as roles or plain, which need none but eos_token"
                )
            ends = list(dict.fromkeys([*ends, number]))
        eos = {} if not ends else {"eos_token": self.tokenizer.id_to_token(ends[0])}
        more = (self.padding_side, self.model_max_length)
        return TextTokenizer(self.tokenizer, ends, self.bos, template, {**eos, **self._special}, *more)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and generation_config.json, which from_pretrained reads; of the
        last, what a model has said there stays."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self._special}
        settings |= {"add_bos_token": self.bos is not None}
        if self.template is not None:
            settings["chat_template"] = self.template
        write_json(folder / "tokenizer_config.json", settings)
        ids = {f"{name}_id": _id(self.tokenizer, self._special.get(name)) for name in ("bos_token", "pad_token")}
        known = {name: number for name, number in ids.items() if number is not None}
        file = folder / "generation_config.json"
        write_json(file, _json(file) | known | {"eos_token_id": list(self.end)})

    def gguf_fields(self, vocab_size: int) -> dict[str, Any]:
        """What the metadata of a GGUF file says of this tokenizer, for a model with rows for vocab_size tokens.

        Raises ConfigError for one that is no byte-level BPE, or that cuts texts before merges in a way without a name.
        """
        said = json.loads(self.tokenizer.to_str())
        model = said["model"]
        cut = next((name for name in _CUTTINGS if _same_cutter(said["pre_tokenizer"], name)), None)
        if model["type"] != "BPE" or model.get("byte_fallback") or cut is None:
            raise ConfigError(
                f"a tokenizer of the kind {model['type']} that cuts texts so cannot be written into a GGUF file; "
                f"byte-level BPE can, cut as {', '.join(_CUTTINGS)}"
            )
        if len(self.tokenizer.get_vocab()) > vocab_size:
            raise ConfigError(f"the tokenizer has {self.vocab_size} tokens, and the model rows for {vocab_size}")
        # 1 is a token, 3 one that stands for no text, 5 a row without one
        tokens, kinds = [f"[PAD{i}]" for i in range(vocab_size)], [5] * vocab_size
        for token, i in model["vocab"].items():
            tokens[i], kinds[i] = token, 1
        for added in said["added_tokens"]:
            tokens[added["id"]], kinds[added["id"]] = added["content"], 3 if added["special"] else 4
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        named = {name: _id(self.tokenizer, self._special.get(f"{name}_token")) for name in ("bos", "eos")}
        if named["eos"] is None and self.end:
            named["eos"] = self.end[0]
        fields: dict[str, Any] = {"model": "gpt2", "pre": cut, "tokens": tokens, "token_type": kinds, "merges": merges}
        fields |= {f"{name}_token_id": i for name, i in named.items() if i is not None}
        others = [i for i in self.end if i != named["eos"]]
        fields |= {"eot_token_id": others[0]} if others else {}
        fields["add_bos_token"] = self.bos is not None
        template = {} if self.template is None else {"tokenizer.chat_template": self.template}
        return {f"tokenizer.ggml.{key}": value for key, value in fields.items()} | template


class AutoTokenizer:
    """The tokenizer of published weights."""

    @classmethod
    def from_pretrained(cls, path: str | Path) -> TextTokenizer:
        """A TextTokenizer of a folder (tokenizer.json, tokenizer_config.json, generation_config.json), a GGUF file, or
        weights that were fetched by name.

        Raises CheckpointError for a folder without tokenizer.json and for damaged files, ConfigError for tokenizers of
        another kind and for what is not there.
        """
        path = resolve(path)
        return _of_gguf(path) if is_gguf(path) else _of_folder(path)


def _of_folder(folder: Path) -> TextTokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: neither a folder of published weights nor a GGUF file")
        raise CheckpointError(f"{folder}: no tokenizer.json in it; save it with the tokenizers library")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  (the library raises bare Exceptions)
        raise CheckpointError(f"{file}: not a readable tokenizer ({error})") from None
    settings = _json(folder / "tokenizer_config.json")
    special = {
        name: token for name in ("bos_token", "eos_token", "pad_token", "unk_token") if (token := _text(settings, name))
    }
    end = [_id(tokenizer, special.get("eos_token"))]
    for name in ("generation_config.json", "config.json"):
        ids = _json(folder / name).get("eos_token_id")
        end += ids if isinstance(ids, list) else [ids]
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = _by_tools(named.get("default"), named.get("tool_use"))
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        template = beside.read_text(encoding="utf-8")
    # a tokenizer.json says itself what it puts before a text; settings say it for the others
    bos = _id(tokenizer, special.get("bos_token")) if settings.get("add_bos_token") else None
    ends = [*dict.fromkeys(i for i in end if isinstance(i, int))]
    side, limit = settings.get("padding_side", "right"), settings.get("model_max_length")
    limit = limit if isinstance(limit, int) and 0 < limit < _NO_LIMIT else None
    return TextTokenizer(tokenizer, ends, bos, template, special, side, limit)


def _of_gguf(path: Path) -> TextTokenizer:
    fields = gguf_fields(path, "tokenizer.")
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(f"{path}: a tokenizer of the kind {kind!r}; of GGUF files byte-level BPE ('gpt2') is read")
    tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges])
    )
    tokenizer.pre_tokenizer = _cutter(path, fields.get("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields.get("tokenizer.ggml.token_type", [])
    tokenizer.add_special_tokens([token for token, number in zip(tokens, kinds, strict=False) if number == 3])
    special = {
        f"{name}_token": tokens[fields[key]]
        for name, key in (("bos", "tokenizer.ggml.bos_token_id"), ("eos", "tokenizer.ggml.eos_token_id"))
        if key in fields
    }
    end = [fields[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in fields]
    bos = fields.get("tokenizer.ggml.bos_token_id") if fields.get("tokenizer.ggml.add_bos_token") else None
    return TextTokenizer(tokenizer, end, bos, fields.get("tokenizer.chat_template"), special)


def _cutter(path: Path, name: str) -> Any:
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name in _CUTS:
        from_pattern = import_module("tokenizers").Regex(_CUTS[name])
        return pre_tokenizers.Sequence([pre_tokenizers.Split(from_pattern, "isolated"), bytes_alone])
    cut_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _BY_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), cut_words])
    if name in ("default", "gpt-2"):
        return cut_words
    known = ", ".join([*_CUTS, *_BY_DIGITS, "default", "gpt-2"])
    raise ConfigError(f"{path}: texts are cut in the way {name!r} before merges, which is none of {known}")


def _same_cutter(said: Any, name: str) -> bool:
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = _cutter(Path(), name)
    return _without_trim(json.loads(plain.to_str())["pre_tokenizer"]) == _without_trim(said)


def _without_trim(said: Any) -> Any:
    """A cutter but for what tells of places in the text alone."""
    if isinstance(said, list):
        return [_without_trim(part) for part in said]
    if not isinstance(said, dict):
        return said
    return {key: _without_trim(value) for key, value in said.items() if key != "trim_offsets"}


def _as_tensor(rows: list[list[int]], kind: str) -> Any:
    """Rows of ids as what return_tensors names."""
    if kind not in ("np", "pd", "pt"):
        raise ConfigError(f"tokenizer: return_tensors={kind!r}; give np for NumPy arrays or pd for Tensors")
    if len({*map(len, rows)}) > 1:
        raise ConfigError("tokenizer: return_tensors of rows of several lengths; give padding=True, or truncation too")
    array = np.array(rows, np.int64).reshape([len(rows), -1])
    return array if kind == "np" else to_tensor(array)


def _by_tools(plain: str | None, with_tools: str | None) -> str | None:
    """One template of two, the second where a conversation has tools."""
    if plain is None or with_tools is None:
        return plain or with_tools
    return f"{{%- if tools %}}{with_tools}{{%- else %}}{plain}{{%- endif %}}"


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _text(settings: Mapping[str, Any], name: str) -> str | None:
    token = settings.get(name)
    return token.get("content") if isinstance(token, Mapping) else token


def _id(tokenizer: Tokenizer, token: str | None) -> int | None:
    return None if token is None else tokenizer.token_to_id(token)


def _render(template: str, variables: Mapping[str, Any]) -> str:
    try:
        jinja2 = import_module("jinja2")
    except ImportError:
        raise ConfigError("chat templates need jinja2: pip install polyreme[text]") from None
    if len(template) > _TEMPLATE_CHARS:
        raise ConfigError(f"the chat template has {len(template)} characters, over the limit of {_TEMPLATE_CHARS}")
    parts, size = [], 0
    try:
        with _deadline(_TEMPLATE_SECONDS, jinja2.TemplateError(f"it took over {_TEMPLATE_SECONDS:g} s")):
            for part in _compiled(template).generate(variables):
                size += len(part)
                if size > _TEXT_CHARS:
                    raise ConfigError(f"the chat template wrote over {_TEXT_CHARS} characters")
                parts.append(part)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  (any expression of a template may fail)
        raise ConfigError(f"the chat template failed: {type(error).__name__}: {error}") from None
    return "".join(parts)


@lru_cache(maxsize=8)  # compiling takes longer than rendering
def _compiled(template: str) -> Any:
    jinja2, sandbox = import_module("jinja2"), import_module("jinja2.sandbox")

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """Numbers and texts of an ordinary size alone: one operation takes no deadline."""
            if operator == "**" or _product_size(left, right) > _TEXT_CHARS:
                raise jinja2.TemplateError(f"the result of {operator} may be too large")
            return super().call_binop(context, operator, left, right)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    return environment.from_string(template)


def _product_size(left: Any, right: Any) -> int:
    """How large left * right may be: characters or items, or of a number, which takes longer, 256 times its bits."""
    sizes = [
        value.bit_length() if isinstance(value, int) else len(value) if hasattr(value, "__len__") else 1
        for value in (left, right)
    ]
    counts = [value for value in (left, right) if isinstance(value, int)]
    return 256 * sum(sizes) if len(counts) == 2 else max(sizes) * max([1, *map(abs, counts)])


@contextmanager
def _deadline(seconds: float, error: Exception) -> Iterator[None]:
    """Raise the error in the code of templates that takes more processor time of this thread."""
    end, before = time.thread_time() + seconds, sys.gettrace()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if time.thread_time() > end:
            raise error
        return trace if frame.f_code.co_filename == "<template>" else None

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
