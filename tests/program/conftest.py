"""Static mode for a test: on inside, off afterwards, with Programs, a scope and names of its own."""

import pytest

import polyreme as paddle
from polyreme import static
from polyreme.core import unique_name


@pytest.fixture
def static_mode():
    """(main, startup) in force; ops are recorded."""
    main, startup = static.Program(), static.Program()
    with unique_name.guard(), static.program_guard(main, startup), static.scope_guard(static.Scope()):
        paddle.enable_static()
        try:
            yield main, startup
        finally:
            paddle.disable_static()
