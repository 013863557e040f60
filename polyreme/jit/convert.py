"""Python to Python: if, while, for, and, or, not become calls of jit.control_flow, by AutoGraph's transpiler.

Conversion follows calls into the user's functions, never into this package, its engine or the standard
library. Converted code keeps the file and line numbers of the source it came from.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

from malt.converters import (
    break_statements,
    call_trees,
    conditional_expressions,
    continue_statements,
    functions,
    logical_expressions,
    return_statements,
    variables,
)
from malt.converters import control_flow as malt_control_flow
from malt.core import converter
from malt.impl import api
from malt.operators import FunctionScope, Undefined, UndefinedReturnValue, ldu, py_builtins
from malt.pyct import anno, errors, inspect_utils, transpiler

from polyreme.call_site import user_line, where_defined
from polyreme.core.state import TensorState
from polyreme.errors import CaptureError
from polyreme.jit import builtin_calls, control_flow, host_calls, mutation
from polyreme.jit.capture import capture_in_progress, unconverted
from polyreme.jit.rewrite import rewrite
from polyreme.jit.source import check_source, code_within
from polyreme.jit.structure import tensors_in
from polyreme.jit.surroundings import is_layer
from polyreme.jit.verbosity import log, show_code, told

_SKIPPED = frozenset(
    {"polyreme", "jax", "jaxlib", "numpy", "scipy", "malt", "optax", "safetensors", "orbax", "pytest", "_pytest"}
)
_STDLIB = sysconfig.get_paths()["stdlib"]
_SITE = tuple({sysconfig.get_paths()[k] for k in ("purelib", "platlib")})
_FUTURE = __future__.annotations.compiler_flag
# they call their first argument
_CALLERS = (map, filter, functools.reduce)
_MARK = "polyreme_converted"
# what the transpiler raises for source it cannot have or cannot take
_REFUSALS = (
    errors.PyCTError, OSError, SyntaxError, TypeError, ValueError, AttributeError, KeyError, IndexError,
    NotImplementedError, AssertionError,
)  # fmt: skip


class _ConversionSwitch:
    """Off inside a not_to_static function."""

    __slots__ = ("is_on",)

    def __init__(self) -> None:
        self.is_on = True


_switch = _ConversionSwitch()
_OPTIONS = converter.STANDARD_OPTIONS
# code object -> maker of its converted form
_factories: Any = weakref.WeakKeyDictionary()
told.forget = _factories.clear


@contextmanager
def _off() -> Any:
    outer, _switch.is_on = _switch.is_on, False
    try:
        yield
    finally:
        _switch.is_on = outer


class _Scope(FunctionScope):
    """One call of a converted function."""

    def ret(self, value: Any, did_return: Any) -> Any:
        """The function's result; CaptureError if some paths return one and others end without."""
        if isinstance(value, UndefinedReturnValue):
            return None
        if isinstance(did_return, TensorState) and tensors_in(value):
            raise CaptureError(
                f"{user_line()}: {self.function_name}: whether it returns a value or ends without one depends on a "
                "Tensor; return a value of the same shape and dtype on every path"
            )
        return value

    def __init__(self, function_name: str, scope_name: str, options: Any) -> None:
        super().__init__(function_name, scope_name, options)
        self.function_name = function_name


def _with_scope(thunk: Callable, scope_name: str, options: Any) -> Any:
    with _Scope("lambda", scope_name, options) as scope:
        return thunk(scope)


def _artifact(fn: Any) -> Any:
    setattr(fn, _MARK, True)
    return fn


class _Transpiler(api.PyToPy):
    """malt's passes; its code is loaded here, so that lines stay those of the source."""

    def get_transformed_name(self, node: Any) -> str:
        return transpiler.GenericTranspiler.get_transformed_name(self, node)

    def get_extra_locals(self) -> dict[str, Any]:
        return {"ag__": _OPERATORS}

    def transform_ast(self, node: Any, ctx: Any) -> Any:
        node = rewrite(node, ctx.user.owner)
        node = self.initial_analysis(node, ctx)
        for number, step in enumerate(_PASSES, 1):
            node = step(node, ctx)
            show_code(getattr(node, "name", "lambda"), number, len(_PASSES), functools.partial(_text_of, node))
        return node

    def factory(self, fn: types.FunctionType) -> Callable[..., Any]:
        """A maker of the converted fn: (ag__) -> function; its closure cells are dummies."""
        check_source(fn)
        context: Any = converter.ProgramContext(options=_OPTIONS)
        context.owner = _class_of(fn)
        node: Any
        node, info = transpiler.GenericTranspiler.transform_function(self, fn, context)
        name = info.info.name
        if isinstance(node, ast.Lambda):
            node = ast.Assign(targets=[ast.Name(name, ast.Store())], value=node)
        else:
            node.name = name
        _restore_lines(node, fn.__code__.co_firstlineno)
        make = _module(node, name, fn.__code__.co_freevars)
        flags = fn.__code__.co_flags & _FUTURE
        space: dict[str, Any] = {}
        # compiled under the user's file name: tracebacks and our messages show the user's lines
        exec(compile(make, fn.__code__.co_filename, "exec", flags=flags, dont_inherit=True), space)
        return space["ag__outer"]()


class _Conditional(conditional_expressions.ConditionalExpressionTransformer):
    """malt's pass, also for a conditional expression inside another."""

    def visit_IfExp(self, node: Any) -> Any:
        inner: Any = self.generic_visit(node)
        return super().visit_IfExp(inner)


_PASSES = (
    functions.transform,
    break_statements.transform,
    continue_statements.transform,
    return_statements.transform,
    call_trees.transform,
    malt_control_flow.transform,
    lambda node, ctx: _Conditional(ctx).visit(node),
    logical_expressions.transform,
    variables.transform,
)


def _class_of(fn: types.FunctionType) -> str | None:
    """The class whose body a function is written in, by which Python compiles private names."""
    around = fn.__code__.co_qualname.split(".")[:-1]
    if around and around[-1] == "<locals>":
        # a function inside a method has the method's class
        around = around[:-2]
    return around[-1] if around and around[-1] != "<locals>" and around[-1].isidentifier() else None


def _restore_lines(node: ast.AST, first: int) -> None:
    """Set every node's line to that of the source it came from, or of the node around it."""
    origin: Any = anno.getanno(node, anno.Basic.ORIGIN, default=None)
    line = origin.loc.lineno if origin is not None else first
    if hasattr(node, "lineno") or isinstance(
        node, (ast.stmt, ast.expr, ast.arg, ast.keyword, ast.excepthandler, ast.alias)
    ):
        node.lineno = node.end_lineno = line  # type: ignore[attr-defined]
        node.col_offset = node.end_col_offset = 0  # type: ignore[attr-defined]
    inside = line
    for child in ast.iter_child_nodes(node):
        _restore_lines(child, inside)
        if isinstance(child, ast.stmt):
            # generated statements after this one belong to it
            inside = child.lineno


def _module(node: ast.stmt, name: str, free: tuple[str, ...]) -> ast.Module:
    inner = ast.parse(f"def ag__inner(ag__):\n  return {name}").body[0]
    inner.body.insert(0, node)  # type: ignore[attr-defined]
    outer = ast.parse("def ag__outer():\n  return ag__inner").body[0]
    cells = [ast.Assign(targets=[ast.Name(v, ast.Store())], value=ast.Constant(None)) for v in free]
    outer.body[:0] = [*cells, inner]  # type: ignore[attr-defined]
    return ast.fix_missing_locations(ast.Module(body=[outer], type_ignores=[]))


def _text_of(node: ast.AST) -> str:
    """A node of generated code as source."""
    return ast.unparse(ast.fix_missing_locations(copy.deepcopy(node)))


_transpiler = _Transpiler()


class _Ignored:
    """Modules whose functions run as they are written, by name."""

    def __init__(self) -> None:
        self.modules: set[str] = set()

    def __contains__(self, module: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in self.modules)


_ignored = _Ignored()


def ignore_module(modules: Sequence[types.ModuleType]) -> None:
    """Leave the functions of these modules, and of modules inside them, as they are written: no control flow in them is
    converted, in what is captured from now on. Raises TypeError for what is no module.
    """
    every = [modules] if isinstance(modules, types.ModuleType) else list(modules)
    for module in every:
        if not isinstance(module, types.ModuleType):
            raise TypeError(f"ignore_module takes a list of modules, got {type(module).__name__} in it")
    _ignored.modules |= {module.__name__ for module in every}


def converted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn with its control flow converted; fn itself where that is not wanted or cannot be done.

    The first time a function cannot be converted, a warning names it and the reason.
    """
    _note(fn)
    if not _switch.is_on:
        return fn
    if isinstance(fn, types.MethodType):
        inner = _function(fn.__func__)
        return fn if inner is fn.__func__ else types.MethodType(inner, fn.__self__)
    if isinstance(fn, functools.partial):
        return functools.partial(converted(fn.func), *fn.args, **fn.keywords)
    if isinstance(fn, types.FunctionType) or inspect.isclass(fn):
        return _function(fn)
    call = getattr(type(fn), "__call__", None)  # noqa: B004  (dunder methods are looked up on the class)
    if isinstance(call, types.FunctionType) and _is_users(call):
        return types.MethodType(_function(call), fn)
    return fn


def _note(fn: Any) -> None:
    """Tell the capture in progress that a function of the user's is about to run."""
    capture = capture_in_progress()
    if capture is not None:
        if isinstance(fn, types.MethodType):
            if is_layer(fn.__self__):
                capture.surroundings.met(type(fn.__self__).__name__, fn.__self__)
            fn = fn.__func__
        fn = inspect.unwrap(fn) if isinstance(fn, types.FunctionType) else fn
        if isinstance(fn, types.FunctionType) and not hasattr(fn, _MARK) and _is_users(fn):
            capture.surroundings.called(fn)


def _function(fn: Any) -> Any:
    if not isinstance(fn, types.FunctionType) or not _wanted(fn):
        return fn
    code = fn.__code__
    factory = _factories.get(code)
    if factory is None:
        if code in unconverted:
            return fn
        try:
            factory = _factories[code] = _transpiler.factory(fn)
            log.debug("converted the control flow of %s", where_defined(fn))
        except _REFUSALS as error:
            reason = _refuse(fn, error)
            for inside in code_within(code):
                unconverted[inside] = reason
            return fn
    return _bind(factory, fn)


def _refuse(fn: Callable, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, (errors.InaccessibleSourceCodeError, OSError)):
        reason = "its source cannot be had"
    log.warning("%s runs without conversion of control flow on Tensors: %s", where_defined(fn), reason)
    return reason


def _bind(factory: Callable, fn: types.FunctionType) -> Callable:
    """The converted function in fn's own closure, globals and defaults."""
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in factory.__code__.co_freevars)
    make = types.FunctionType(factory.__code__, fn.__globals__, "ag__inner", (), closure)
    made = make(_OPERATORS)
    made.__defaults__, made.__kwdefaults__ = fn.__defaults__, fn.__kwdefaults__
    made.__name__, made.__qualname__, made.__doc__ = fn.__name__, fn.__qualname__, fn.__doc__
    return _artifact(made)


def _wanted(fn: types.FunctionType) -> bool:
    code = fn.__code__
    if hasattr(fn, _MARK) or getattr(fn, "not_converted", False):
        return False
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        if _is_users(fn):
            unconverted.setdefault(code, "generators and coroutines are not converted")
        return False
    wrapped = getattr(fn, "__wrapped__", None)
    if isinstance(wrapped, types.FunctionType) and wrapped.__code__ is not code and _is_users(wrapped):
        # a decorator of ours, such as no_grad, around a function of theirs
        return True
    return _is_users(fn)


def _is_users(fn: types.FunctionType) -> bool:
    module = fn.__module__ or ""
    root = module.partition(".")[0]
    file = fn.__code__.co_filename
    if root in _SKIPPED or module in _ignored or (file.startswith(_STDLIB) and not file.startswith(_SITE)):
        return False
    return root not in sys.stdlib_module_names or not file.startswith("<")


def converted_call(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, scope: Any = None, options: Any = None
) -> Any:
    """fn(*args, **kwargs), fn converted if it is the user's; generated code makes every call through this."""
    kwargs = kwargs or {}
    if isinstance(fn, functools.partial):
        return converted_call(fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}, scope)
    mutation.note_call(fn)
    if fn is range:
        return control_flow.make_range(*args)
    if inspect_utils.isbuiltin(fn):
        return _builtin(fn, args, kwargs, scope)
    if getattr(fn, "not_converted", False):
        _note(fn)
        with _off():
            return fn(*args, **kwargs)
    return mutation.own_result(fn, converted(fn)(*args, **kwargs))


def _builtin(fn: Any, args: tuple, kwargs: dict[str, Any], scope: Any) -> Any:
    if fn is super:
        return py_builtins.super_in_original_context(fn, args, scope)
    if fn is eval:
        return py_builtins.eval_in_original_context(fn, args, scope)
    if fn is globals:
        return py_builtins.globals_in_original_context(scope)
    if fn is locals:
        return py_builtins.locals_in_original_context(scope)
    call: Any = builtin_calls.replaced(fn)
    if fn in _CALLERS and args:
        args = (converted(args[0]), *args[1:])
    return mutation.own_result(fn, call(*args, **kwargs))


_OPERATORS = types.SimpleNamespace(
    FunctionScope=_Scope,
    with_function_scope=_with_scope,
    ConversionOptions=converter.ConversionOptions,
    STD=_OPTIONS,
    autograph_artifact=_artifact,
    converted_call=converted_call,
    Undefined=Undefined,
    UndefinedReturnValue=UndefinedReturnValue,
    ld=control_flow.ld,
    ldu=ldu,
    if_stmt=control_flow.if_stmt,
    if_exp=control_flow.if_exp,
    while_stmt=control_flow.while_stmt,
    forever=control_flow.forever,
    for_stmt=control_flow.for_stmt,
    and_=control_flow.and_,
    or_=control_flow.or_,
    not_=control_flow.not_,
    own=mutation.own,
    slice=slice,
    set_item=mutation.set_item,
    update_item=mutation.update_item,
    del_item=mutation.del_item,
    set_attr=mutation.set_attr,
    update_attr=mutation.update_attr,
    del_attr=mutation.del_attr,
    update=mutation.update,
    text=host_calls.text,
    percent=host_calls.percent,
    print_of=host_calls.print_of,
    check=host_calls.check,
    raised=host_calls.raised,
    caught=host_calls.caught,
)
"""The `ag__` of generated code."""
