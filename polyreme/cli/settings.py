"""What `polyreme pretrain --settings` prints: every setting of a configuration, its default and what it means."""

import inspect
import json
from itertools import groupby

from polyreme.recipes.config import PretrainConfig, flatten


def describe() -> str:
    """The list, as text: section by section, what the section is for and a line for each key."""
    defaults = PretrainConfig()
    sections = []
    for name, entries in groupby(flatten(defaults).items(), lambda entry: entry[0].partition(".")[0]):
        rows = [f"  {key} = {json.dumps(value, ensure_ascii=False)}" for key, value in entries]
        section = getattr(defaults, name)
        about = inspect.getdoc(type(section)).partition("\n\n>>>")[0] if hasattr(section, "model_fields") else ""
        sections.append("\n".join([*([about, ""] if about else []), *rows]))
    return "\n\n".join(sections)
