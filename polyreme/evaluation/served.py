"""A model behind an OpenAI-compatible server that echoes prompts with log-probabilities, as `polyreme serve` does."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from polyreme.errors import ConfigError, DataError
from polyreme.evaluation.scorer import ScoredTokens, template_digest
from polyreme.generation.sampling import SamplingParams

_TEXTS = 16
"""Of one request."""
_SECONDS = 600.0
_TRIES = 20


class ServerScorer:
    """A served model, by the address of its server. key: of the server, if it needs one. model: its name there, the
    first that the server lists if None.

    Raises ConfigError for what is no address, DataError for a server that is not reached or refuses.
    """

    url: str

    def __init__(self, url: str, key: str | None = None, model: str | None = None) -> None:
        self.url = url.removesuffix("/").removesuffix("/v1")
        try:
            address = urlsplit(self.url)
            host, port = address.hostname, address.port  # ValueError for what is no port
        except ValueError as error:
            raise ConfigError(f"{url}: not an address ({error}); give one such as http://127.0.0.1:8000") from None
        if address.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{url}: not an address; give one such as http://127.0.0.1:8000")
        self._host, self._port, self._path = host, port, address.path
        self._is_secure, self._key = address.scheme == "https", key
        listed = self._ask("GET", "/v1/models")["data"]
        entries = [entry for entry in listed if model in (None, entry["id"])]
        if not entries:
            raise ConfigError(f"{self.url}: serves {', '.join(entry['id'] for entry in listed)}, not {model}")
        self._model = entries[0]

    @property
    def max_tokens(self) -> int:
        """One less than the server's, as it writes a token after each text."""
        return int(self._model["max_model_len"]) - 1

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text."""
        return self._ask("POST", "/tokenize", {"prompt": text, "add_special_tokens": add_special_tokens})["tokens"]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation up to where the answer begins."""
        return self._ask("POST", "/tokenize", {"messages": [dict(message) for message in messages]})["tokens"]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return self._ask("POST", "/detokenize", {"tokens": list(ids)})["prompt"]

    def token_id(self, name: str) -> int | None:
        """The id of bos_token or eos_token, None where there is none."""
        token = self._tokenizer.get(name)
        if token is None:
            return None
        ids = self.encode(token)
        return ids[0] if len(ids) == 1 else None

    def score(self, texts: Sequence[Sequence[int]]) -> list[ScoredTokens]:
        """Of each text, token ids, how likely its tokens are."""
        scored = []
        for part in _parts(texts):
            body = {"prompt": part, "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
            for choice in self._complete(body):
                told = choice["logprobs"]
                logprobs = np.array(told["token_logprobs"][1:], np.float64)
                best = np.array([max(top.values()) for top in told["top_logprobs"][1:]])
                scored.append(ScoredTokens(logprobs, logprobs >= best))
        return scored

    def write(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[str]:
        """The text after each prompt."""
        names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens")
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        settings = {name: getattr(params, name) for name in (*names, *penalties)} | {"stop": list(params.stop)}
        return [choice["text"] for part in _parts(prompts) for choice in self._complete({**settings, "prompt": part})]

    def facts(self) -> dict[str, Any]:
        """What results depend on: model, dtype and plan as far as the server tells, digest of the chat template."""
        told = {name: self._model.get(name) for name in ("dtype", "plan")}
        return {"model": self._model["id"], **told, "template": template_digest(self._tokenizer.get("chat_template"))}

    @cached_property
    def _tokenizer(self) -> dict[str, Any]:
        return self._ask("GET", "/tokenizer_info")

    def _complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        choices = self._ask("POST", "/v1/completions", {"model": self._model["id"], **body})["choices"]
        return sorted(choices, key=lambda choice: choice["index"])

    def _ask(self, method: str, route: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = None if body is None else json.dumps(body)
        for _ in range(_TRIES):
            status, answer = self._exchange(method, self._path + route, data, headers)
            if status == 429:  # others ask too
                time.sleep(1)
                continue
            if status != 200:
                raise DataError(f"{self.url}{route}: {status}: {answer[:500].decode(errors='replace')}")
            return json.loads(answer)
        raise DataError(f"{self.url}{route}: the server had no room for {_TRIES} s; ask again when others are done")

    def _exchange(self, method: str, path: str, data: str | None, headers: dict[str, str]) -> tuple[int, bytes]:
        if self._is_secure:
            line: Any = http.client.HTTPSConnection(
                self._host, self._port, timeout=_SECONDS, context=ssl.create_default_context()
            )
        else:
            line = http.client.HTTPConnection(self._host, self._port, timeout=_SECONDS)
        try:
            line.request(method, path, data, headers)
            answer = line.getresponse()
            return answer.status, answer.read()
        except (BrokenPipeError, ConnectionResetError):
            size = len(data or "")
            raise DataError(
                f"{self.url}: the server hung up on a request of {size:,} characters; if it takes no more, give less "
                "text, or --limit"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise DataError(f"{self.url}: {error or type(error).__name__}; is a server there?") from None
        finally:
            line.close()


def _parts(texts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    return [[list(ids) for ids in texts[start : start + _TEXTS]] for start in range(0, len(texts), _TEXTS)]
