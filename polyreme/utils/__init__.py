"""polyreme.utils: ops of one's own, checking an installation, unique names. The public path asks for this name."""

from polyreme.core import unique_name
from polyreme.core.custom_op import register_op
from polyreme.utils import cpp_extension
from polyreme.utils.check import run_check

__all__ = ["cpp_extension", "register_op", "run_check", "unique_name"]
