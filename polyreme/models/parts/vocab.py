"""Vocabulary sizes that split evenly over devices."""

from polyreme.errors import ConfigError


def padded_vocab_size(vocab_size: int, multiple: int = 128) -> int:
    """The least multiple of `multiple` that holds vocab_size entries: a size to build a model with.

    It does not depend on the mesh, so a checkpoint fits every mesh whose mp divides `multiple`. The entries added are
    classes that no label names: training drives their probability down like that of any class never seen.
    Raises ConfigError for a number below 1.

    >>> padded_vocab_size(50257)
    50304
    """
    if vocab_size < 1 or multiple < 1:
        raise ConfigError(f"padded_vocab_size({vocab_size}, {multiple}): give two numbers of at least 1")
    return -(-vocab_size // multiple) * multiple
