"""Chat templates by name, for tokenizers that bring none. Each closes every answer, and adds nothing of its own."""

from __future__ import annotations

from pathlib import Path

from polyreme.errors import ConfigError, did_you_mean

_TURNS = "{% for message in messages %}"
TEMPLATES = {
    # a model of plain text learns prompt and answer as one text
    "plain": _TURNS
    + "{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}",
    "roles": _TURNS
    + "{{ message['role'] }}: {{ message['content'] | trim }}"
    + "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
    + "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}",
    "chatml": _TURNS
    + "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "llama3": "{{ bos_token }}"
    + _TURNS
    + "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim"
    + " + '<|eot_id|>' }}{% endfor %}"
    + "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    "mistral": "{{ bos_token }}"
    + _TURNS
    + "{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}"
    + "{% elif message['role'] == 'system' %}{{ '[INST] ' + message['content'] | trim + '\\n\\n' }}"
    + "{% else %}{{ '' if loop.index0 and messages[loop.index0 - 1]['role'] == 'system' else '[INST] ' }}"
    + "{{ message['content'] | trim + ' [/INST]' }}{% endif %}{% endfor %}",
}
"""plain: texts one after another, answers closed by eos_token; roles: "role: text" lines, so closed too; the others are
the forms of published models, whose tokenizers have the tokens that they are made of."""


def load_template(name: str, base: Path | None = None) -> str:
    """A template by its name, or the text of a file that ends in .jinja, looked for below base if it is relative.

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
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"template {path}: cannot be read: {error}") from None
