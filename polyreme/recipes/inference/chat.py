"""A conversation on a terminal, by the template that a model was trained with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from polyreme.generation import SamplingParams, TextGenerator
from polyreme.generation.text_stream import TextStream
from polyreme.recipes.inference.generate import write
from polyreme.recipes.weights.trained import load_writer

ANEW, LEAVE = "/new", ("/exit", "/quit")


def run(
    path: Path,
    *,
    params: SamplingParams,
    system: str = "",
    dtype: str | None = None,
    adapter: Path | None = None,
    ask: Callable[[], str | None],
    say: Callable[[str], None],
) -> None:
    """Answer each text that ask returns, until it returns None or a word of LEAVE; ANEW begins a new conversation.

    path, dtype, adapter: as of load_writer. system: what stands before every conversation. say: takes each piece of an
    answer as soon as it is sure, and that a conversation has no room for a question: answers end at the model's last
    position. Raises as load_writer does, and where the model has no chat template.
    """
    model, tokenizer = load_writer(path, dtype, adapter)
    first = [{"role": "system", "content": system}] if system else []
    tokenizer.encode_chat([*first, {"role": "user", "content": "?"}])  # told before anyone types
    generator, messages, number = TextGenerator(model, tokenizer.end, tokenizer.vocab_size), [*first], 0
    while (text := ask()) is not None and text.strip() not in LEAVE:
        if not text.strip():
            continue
        if text.strip() == ANEW:
            messages = [*first]
            continue
        messages.append({"role": "user", "content": text})
        ids = tokenizer.encode_chat(messages)
        room = model.config.seq_len - len(ids)
        if room < 1:
            say(
                f"the conversation would have {len(ids)} tokens, and the model has positions for "
                f"{model.config.seq_len}; begin anew with {ANEW}\n"
            )
            messages.pop()
            continue
        pieces: list[str] = []

        def take(piece: str, pieces: list[str] = pieces) -> None:
            pieces.append(piece)
            say(piece)

        stream = TextStream(tokenizer, params.stop, params.min_tokens, ())
        now = replace(params, seed=params.seed + number, max_tokens=min(params.max_tokens, room))
        write(generator, stream, ids, now, take)
        say("\n")
        messages.append({"role": "assistant", "content": "".join(pieces)})
        number += 1
