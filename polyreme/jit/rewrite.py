"""Statements that malt leaves alone or cannot take, written as calls of ag__ operators, before malt's passes run.

Stores into items and attributes, in-place operators, container displays, f-strings, print, assert and raise
become calls, so that a branch or loop on a Tensor can account for them (jit.mutation, jit.host_calls). What
Python would compile differently outside its class or statement is spelled out: private names, `except E as e`, `:=`
inside an operand.
"""

from __future__ import annotations

import ast
import copy
from typing import Any

from malt.pyct import anno, errors

_IN_PLACE = {
    ast.Add: "iadd", ast.Sub: "isub", ast.Mult: "imul", ast.MatMult: "imatmul", ast.Div: "itruediv",
    ast.FloorDiv: "ifloordiv", ast.Mod: "imod", ast.Pow: "ipow", ast.LShift: "ilshift", ast.RShift: "irshift",
    ast.BitAnd: "iand", ast.BitOr: "ior", ast.BitXor: "ixor",
}  # fmt: skip
_FUNCTIONS = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_REFUSED = {
    ast.Match: "match statements are", ast.Yield: "generators are", ast.YieldFrom: "generators are",
    ast.Await: "coroutines are", ast.AsyncFunctionDef: "coroutines are",
    ast.TryStar: "except* is",
}  # fmt: skip


def rewrite(node: ast.AST, owner: str | None) -> Any:
    """The function with these statements as calls. owner: the class it is written in, for private names.

    Raises malt's UnsupportedLanguageElementError, with the line, for statements that have no converted form.
    """
    for inner in ast.walk(node):
        for kind, words in _REFUSED.items():
            if isinstance(inner, kind):
                raise _refusal(inner, f"{words} not converted")
    return _Rewrite(owner).visit(node)


def _refusal(node: ast.AST, reason: str) -> Exception:
    return errors.UnsupportedLanguageElementError(f"line {_line(node)}: {reason}")


def _line(node: ast.AST) -> int:
    origin: Any = anno.getanno(node, anno.Basic.ORIGIN, default=None)
    return origin.loc.lineno if origin is not None else getattr(node, "lineno", 0)


def _call(name: str, *args: ast.expr) -> ast.Call:
    operator = ast.Attribute(ast.Name("ag__", ast.Load()), name, ast.Load())
    return ast.Call(operator, list(args), [])


def _copy_location(new: Any, old: ast.AST) -> Any:
    """new, which stands where old stood."""
    anno.copyanno(old, new, anno.Basic.ORIGIN)
    return ast.copy_location(new, old)


def _load(target: Any) -> Any:
    found = copy.copy(target)
    found.ctx = ast.Load()
    return found


def _key(node: ast.expr) -> ast.expr:
    """The content of the brackets, as an expression."""
    if isinstance(node, ast.Slice):
        return _call("slice", *(ast.Constant(None) if x is None else x for x in (node.lower, node.upper, node.step)))
    if isinstance(node, ast.Tuple):
        return ast.Tuple([_key(x) for x in node.elts], ast.Load())
    return node


class _Rewrite(ast.NodeTransformer):
    def __init__(self, owner: str | None) -> None:
        self.owner = None if owner is None else owner.lstrip("_")
        self.in_try = False

    # private names

    def _private(self, name: str) -> str:
        if not name.startswith("__") or name.endswith("__") or not self.owner:
            return name
        return f"_{self.owner}{name}"

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        node.attr = self._private(node.attr)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> Any:
        node.id = self._private(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> Any:
        node.arg = self._private(node.arg)
        return self.generic_visit(node)

    # stores

    def visit_Assign(self, node: ast.Assign) -> Any:
        if len(node.targets) > 1:
            return self._statement(node)
        return self._store(node, node.targets[0], node.value) or self._statement(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is None:
            return _copy_location(ast.Pass(), node)
        plain = _copy_location(ast.Assign([node.target], node.value), node)
        return self.visit_Assign(plain)

    def _store(self, node: ast.stmt, target: ast.expr, value: ast.expr) -> Any:
        if isinstance(target, ast.Subscript):
            call = _call("set_item", value, target.value, _key(target.slice))
        elif isinstance(target, ast.Attribute):
            call = _call("set_attr", value, target.value, ast.Constant(self._private(target.attr)))
        else:
            return None
        return self._statement(_copy_location(ast.Expr(call), node))

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        operator, target = ast.Constant(_IN_PLACE[type(node.op)]), node.target
        if isinstance(target, ast.Subscript):
            call = _call("update_item", target.value, _key(target.slice), operator, node.value)
        elif isinstance(target, ast.Attribute):
            name = ast.Constant(self._private(target.attr))
            call = _call("update_attr", target.value, name, operator, node.value)
        else:
            value = _call("update", _load(target), operator, node.value)
            return self._statement(_copy_location(ast.Assign([target], value), node))
        return self._statement(_copy_location(ast.Expr(call), node))

    def visit_Delete(self, node: ast.Delete) -> Any:
        statements: list[Any] = []
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                one = ast.Expr(_call("del_item", target.value, _key(target.slice)))
            elif isinstance(target, ast.Attribute):
                one = ast.Expr(_call("del_attr", target.value, ast.Constant(self._private(target.attr))))
            else:
                one = ast.Delete([target])
            statements.append(self.generic_visit(_copy_location(one, node)))
        return statements

    # containers made here

    def _owned(self, node: Any) -> Any:
        made: Any = self.generic_visit(node)
        if isinstance(getattr(node, "ctx", None), ast.Store):
            return made
        return _copy_location(_call("own", made), node)

    visit_List = visit_Dict = visit_Set = visit_ListComp = visit_DictComp = visit_SetComp = _owned

    # text, print, assert, raise

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        return _copy_location(_call("text", ast.Tuple([self._part(x) for x in node.values], ast.Load())), node)

    def _part(self, node: Any) -> ast.expr:
        if not isinstance(node, ast.FormattedValue):
            return node
        how = "" if node.conversion < 0 else chr(node.conversion)
        spec = ast.Constant("") if node.format_spec is None else self.visit(node.format_spec)
        return ast.Tuple([self.visit(node.value), ast.Constant(how), spec], ast.Load())

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        is_text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        made: Any = self.generic_visit(node)
        return (
            _copy_location(_call("percent", made.left, made.right), node)
            if is_text and isinstance(node.op, ast.Mod)
            else made
        )

    def visit_Call(self, node: ast.Call) -> Any:
        node = self.generic_visit(node)  # type: ignore[assignment]
        if isinstance(node.func, ast.Name) and node.func.id == "print":
            node.func = _copy_location(_call("print_of", node.func), node.func)
        return node

    def visit_Assert(self, node: ast.Assert) -> Any:
        text = ast.Constant(ast.unparse(node.test))
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        message = ast.Constant(None) if node.msg is None else ast.Lambda(nothing, node.msg)
        return self._statement(_copy_location(ast.Expr(_call("check", node.test, message, text)), node))

    def visit_Raise(self, node: ast.Raise) -> Any:
        if node.exc is not None:
            node.exc = _copy_location(_call("raised", node.exc, ast.Constant(self.in_try)), node.exc)
        return self._statement(node)

    def visit_Try(self, node: ast.Try) -> Any:
        outer, self.in_try = self.in_try, self.in_try or bool(node.handlers)
        body: list[ast.stmt] = []
        for statement in node.body:
            made = self.visit(statement)
            body += made if isinstance(made, list) else [made]
        self.in_try, node.body = outer, []
        self.generic_visit(node)
        node.body = body
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> Any:
        if node.name is not None:
            caught = ast.Assign([ast.Name(self._private(node.name), ast.Store())], _call("caught"))
            node.body.insert(0, _copy_location(caught, node))
            node.name = None
        return self.generic_visit(node)

    # names bound inside an expression

    def _statement(self, node: Any) -> Any:
        """node, after the assignments that `:=` in its operands makes first."""
        hoisted = _hoist(node)
        node = self.generic_visit(node)
        return [*map(self.visit, hoisted), node] if hoisted else node

    visit_Expr = visit_Return = visit_If = _statement

    def visit_While(self, node: ast.While) -> Any:
        if any(isinstance(x, ast.NamedExpr) for x in ast.walk(node.test)):
            if node.orelse:
                raise _refusal(node, "a while loop with both := in its test and an else is not converted")
            leave = _copy_location(
                ast.If(ast.UnaryOp(ast.Not(), node.test), [_copy_location(ast.Break(), node)], []), node
            )
            node = _copy_location(ast.While(ast.Constant(True), [leave, *node.body], []), node)
        if isinstance(node.test, ast.Constant) and node.test.value:
            node.test = _copy_location(_call("forever"), node.test)
        return self.generic_visit(node)


def _hoist(node: ast.stmt) -> list[ast.stmt]:
    """Take out each := of an operand that is always evaluated, leaving its name; the assignments, in order."""
    made: list[ast.stmt] = []
    for name, value in list(ast.iter_fields(node)):
        if isinstance(value, ast.expr):
            setattr(node, name, _Hoist(node, made).visit(value))
    return made


class _Hoist(ast.NodeTransformer):
    """Operands of and, or, chained comparisons and conditional expressions become lambdas, where := would bind a name
    of the lambda's own."""

    def __init__(self, statement: ast.stmt, made: list[ast.stmt]) -> None:
        self.statement, self.assignments, self.in_operand = statement, made, False

    def visit(self, node: ast.AST) -> Any:
        return node if isinstance(node, _FUNCTIONS) else super().visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Any:
        node = self.generic_visit(node)  # type: ignore[assignment]
        if not self.in_operand:
            return node
        self.assignments.append(_copy_location(ast.Assign([node.target], node.value), self.statement))
        return _load(node.target)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        node.values = [self._first(node.values[0]), *map(self._later, node.values[1:])]
        return node

    def visit_Compare(self, node: ast.Compare) -> Any:
        if len(node.ops) == 1:
            return self.generic_visit(node)
        node.left, node.comparators[0] = self._first(node.left), self._first(node.comparators[0])
        node.comparators[1:] = map(self._later, node.comparators[1:])
        return node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        node.test = self._first(node.test)
        node.body, node.orelse = self._later(node.body), self._later(node.orelse)
        return node

    def _first(self, node: ast.expr) -> ast.expr:
        outer, self.in_operand = self.in_operand, True
        node = self.visit(node)
        self.in_operand = outer
        return node

    def _later(self, node: ast.expr) -> ast.expr:
        if any(isinstance(x, ast.NamedExpr) for x in ast.walk(node)):
            raise _refusal(self.statement, ":= in an operand that may not be evaluated is not converted")
        return node
