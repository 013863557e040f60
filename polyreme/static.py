"""polyreme.static: the parts of the static namespace that imperative code uses.

Floor: 7.  Programs and Executor are a later issue.
"""

from polyreme.hapi.input_spec import InputSpec

__all__ = ["InputSpec"]
