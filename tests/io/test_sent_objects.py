"""Values between processes: as exact as they were sent, classes looked up and never imported."""

import argparse
import dataclasses
import enum
import sys

import numpy as np
import pytest

from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import CheckpointError, DTypeError
from polyreme.io.sent_objects import from_bytes, to_bytes


class Kind(enum.IntEnum):
    """A setting that is one of a few."""

    COSINE = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What ranks compare."""

    rate: float
    kind: Kind
    more: argparse.Namespace


def test_what_is_sent_comes_as_it_was():
    sent = {"settings": [Settings(0.5, Kind.COSINE, argparse.Namespace(depth=3))], "rows": np.arange(2), "n": (1, None)}
    got = from_bytes(to_bytes(sent), "the message")
    assert got["settings"] == sent["settings"]
    assert type(got["settings"][0].kind) is Kind
    assert (type(got["rows"]), got["n"]) == (np.ndarray, (1, None))
    assert isinstance(from_bytes(to_bytes(to_tensor([1.0])), "the message"), Tensor)


def test_classes_that_others_cannot_have_are_refused_on_both_sides(monkeypatch):
    @dataclasses.dataclass
    class Local:
        rate: float

    with pytest.raises(DTypeError, match=r"Local, which other processes cannot find; define the class at the top"):
        to_bytes(Local(1.0))
    message = to_bytes(Settings(1.0, Kind.COSINE, argparse.Namespace()))
    monkeypatch.delitem(sys.modules, Settings.__module__)
    with pytest.raises(CheckpointError, match=r"the message: .*Settings, and this process has no such class"):
        from_bytes(message, "the message")
