"""For type checkers: where the names of polyreme.audio stand. Written by tools/write_stubs.py."""

from polyreme.audio.backends import info as info
from polyreme.audio.backends import load as load
from polyreme.audio.backends import save as save
from polyreme.audio import backends as backends
from polyreme.audio import datasets as datasets
from polyreme.audio import features as features
from polyreme.audio import functional as functional
