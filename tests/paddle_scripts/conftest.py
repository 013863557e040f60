"""Static mode for a test."""

from tests.program.conftest import static_mode

__all__ = ["static_mode"]
