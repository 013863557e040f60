"""Which PaddlePaddle scripts meet: its version decides what they import and which of its ways they go."""

SPOKEN = "3.3.1"
"""The version of PaddlePaddle whose names and behaviour polyreme has."""
full_version = __version__ = SPOKEN
major, minor, patch = SPOKEN.split(".")
rc = "0"
commit = "unknown"


def cinn() -> str:
    """The version of the CINN compiler: "False", there is none."""
    return "False"
