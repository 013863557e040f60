"""A Fluid script's surroundings for a test: Programs, a scope and names of its own, and static mode off afterwards."""

import pytest

import polyreme as paddle
from polyreme import fluid, static
from polyreme.core import unique_name


@pytest.fixture(autouse=True)
def _no_static_mode_after():
    yield
    paddle.disable_static()


@pytest.fixture
def script():
    """The fluid module; nothing of the test outlives it."""
    main, startup = static.Program(), static.Program()
    main.random_seed = startup.random_seed = 1
    with unique_name.guard(), static.program_guard(main, startup), static.scope_guard(static.Scope()):
        yield fluid
