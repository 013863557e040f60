"""For type checkers: where the names of polyreme.jit stand. Written by tools/write_stubs.py."""

from polyreme.export.save import save as save
from polyreme.export.translated_layer import TranslatedLayer as TranslatedLayer
from polyreme.export.translated_layer import load as load
from polyreme.jit.to_static import StaticFunction as StaticFunction
from polyreme.jit.control_flow import case as case
from polyreme.jit.control_flow import cond as cond
from polyreme.jit.to_static import enable_to_static as enable_to_static
from polyreme.jit.convert import ignore_module as ignore_module
from polyreme.jit.to_static import not_to_static as not_to_static
from polyreme.jit.verbosity import set_code_level as set_code_level
from polyreme.jit.verbosity import set_verbosity as set_verbosity
from polyreme.jit.control_flow import switch_case as switch_case
from polyreme.jit.to_static import to_static as to_static
from polyreme.jit.control_flow import while_loop as while_loop
