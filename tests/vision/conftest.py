"""What tests of networks share."""

import pytest

import polyreme
from polyreme import static


@pytest.fixture
def abstract():
    """In a Program layers and calls have shapes alone: nothing is computed and nothing compiled. -> makes an input."""
    polyreme.enable_static()
    try:
        with static.program_guard(static.Program(), static.Program()):
            yield lambda *shape: static.data("x", list(shape))
    finally:
        polyreme.disable_static()
