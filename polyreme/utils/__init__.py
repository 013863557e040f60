"""polyreme.utils: ops of one's own, checking an installation, unique names. The public path asks for this name."""

from polyreme.core import unique_name
from polyreme.core.custom_op import register_op
from polyreme.module_names import suggest_names
from polyreme.utils import cpp_extension, dlpack, download
from polyreme.utils.check import run_check
from polyreme.utils.modules import deprecated, require_version, try_import

__all__ = [
    "cpp_extension",
    "deprecated",
    "dlpack",
    "download",
    "register_op",
    "require_version",
    "run_check",
    "try_import",
    "unique_name",
]

suggest_names(__name__)
