"""polyreme.utils: checking an installation, unique names. The public path asks for this name."""

from polyreme.core import unique_name
from polyreme.utils.check import run_check

__all__ = ["run_check", "unique_name"]
