"""Chat templates by name, for tokenizers that bring none. Each closes every answer, and adds nothing of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polyreme.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template in jinja2. end: the token that closes answers, None for the tokenizer's eos_token or as the text has
    it."""

    text: str
    end: str | None = None


_TURNS = "{% for message in messages %}"
TEMPLATES = {
    "plain": ChatTemplate(
        _TURNS + "{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "roles": ChatTemplate(
        _TURNS
        + "{{ message['role'] }}: {{ message['content'] | trim }}"
        + "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
        + "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    ),
    "chatml": ChatTemplate(
        _TURNS
        + "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_end|>",
    ),
    "llama3": ChatTemplate(
        "{{ bos_token }}"
        + _TURNS
        + "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim"
        + " + '<|eot_id|>' }}{% endfor %}"
        + "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        "<|eot_id|>",
    ),
    "mistral": ChatTemplate(
        "{{ bos_token }}"
        + _TURNS
        + "{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}"
        + "{% elif message['role'] == 'system' %}{{ '[INST] ' + message['content'] | trim + '\n\n' }}"
        + "{% else %}{{ '' if loop.index0 and messages[loop.index0 - 1]['role'] == 'system' else '[INST] ' }}"
        + "{{ message['content'] | trim + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
}
"""plain: texts one after another, answers closed by eos_token; roles: "role: text" lines, so closed too; the others are
the forms of published models, whose tokenizers have the tokens that they are made of."""


def load_template(name: str, base: Path | None = None) -> ChatTemplate:
    """A template by its name, or of a file that ends in .jinja, looked for below base if it is relative.

    Raises ConfigError for a name that there is not, and a file that cannot be read.
    """
    if not name.endswith(".jinja"):
        if name not in TEMPLATES:
            raise ConfigError(
                f"template {name!r} is unknown{did_you_mean(name, TEMPLATES)}; a file's name ends in .jinja"
            )
        return TEMPLATES[name]
    path = (base or Path()) / Path(name).expanduser()
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"template {path}: cannot be read: {error}") from None
