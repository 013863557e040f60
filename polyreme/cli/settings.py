"""What `polyreme pretrain --settings` and finetune print: every setting, its default and what it means."""

import inspect
import json
from itertools import groupby

from polyreme.recipes.config import PretrainConfig, RunConfig, flatten
from polyreme.recipes.finetune_config import ChatData, ConversationSource, FinetuneConfig


def describe() -> str:
    """The list, as text: section by section, what the section is for and a line for each key."""
    return _describe(PretrainConfig())


def describe_finetune() -> str:
    """The same of fine-tuning, after what its own settings are for."""
    about = inspect.getdoc(FinetuneConfig)
    data = ChatData(train=[ConversationSource(path="FILE")])
    return f"{about}\n\n{_describe(FinetuneConfig.model_construct(model='FOLDER', data=data))}"


def _describe(defaults: RunConfig) -> str:
    sections = []
    for name, entries in groupby(flatten(defaults).items(), lambda entry: entry[0].partition(".")[0]):
        section = getattr(defaults, name)
        own = inspect.get_annotations(type(section))  # those of single families, which it inherits, stand last
        entries = sorted(entries, key=lambda entry: entry[0].partition(".")[2] not in own)
        rows = [f"  {key} = {json.dumps(value, ensure_ascii=False)}" for key, value in entries]
        about = (
            (inspect.getdoc(type(section)) or "").partition("\n\n>>>")[0] if hasattr(section, "model_fields") else ""
        )
        sections.append("\n".join([*([about, ""] if about else []), *rows]))
    return "\n\n".join(sections)
