"""Mutations of source code: small changes of arithmetic, comparisons, conditions and statements, one at a time."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

Change = Callable[[], None]
"""Makes a change in a tree."""

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mod: ast.FloorDiv, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


OUTSIDE = ("annotation", "returns", "decorator_list", "args")
"""Fields of a function or an assignment that are no part of what it computes."""


@dataclass(frozen=True)
class Mutant:
    """A change of one function: where it is, what it was and what it becomes, and the function's new code."""

    path: str
    function: str
    line: int
    before: str
    after: str
    text: str
    """The source of the line."""
    column: int
    """Where in that text it is."""
    code: CodeType

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from others, also after lines have moved."""
        return self.path, self.function, self.text, str(self.column), self.before, self.after

    def __str__(self) -> str:
        return f"{self.path}:{self.line} in {self.function}: {self.before} → {self.after}    {self.text}"


def mutants_of(path: Path, root: Path) -> Iterator[Mutant]:
    """All mutants of a file's functions and methods."""
    source = path.read_text(encoding="utf-8")
    lines, tree = source.splitlines(), ast.parse(source)
    for number, (function, name) in enumerate(functions_of(tree)):
        for place in range(len(list(changes_of(function)))):
            copy = deepcopy(tree)
            mine, _ = list(functions_of(copy))[number]
            node, before, after, change = list(changes_of(mine))[place]
            change()
            ast.fix_missing_locations(copy)
            code = code_of(compile(copy, str(path), "exec"), name, function_line(function))
            line = lines[node.lineno - 1]
            at = node.col_offset - len(line) + len(line.lstrip())
            name_of_file = str(path.relative_to(root))
            yield Mutant(name_of_file, name, node.lineno, before, after, line.strip(), at, code)


def function_line(function: ast.FunctionDef) -> int:
    """The first line of a function's code: that of its first decorator."""
    return min([function.lineno, *(one.lineno for one in function.decorator_list)])


def functions_of(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Functions and methods that exist once the module is loaded, and their qualified names."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node, node.name
        elif isinstance(node, ast.ClassDef):
            yield from ((one, f"{node.name}.{one.name}") for one in node.body if isinstance(one, ast.FunctionDef))


def code_of(module: CodeType, name: str, line: int) -> CodeType:
    """The code of a function in a compiled module."""
    todo = [module]
    while todo:
        code = todo.pop()
        if code.co_qualname == name and code.co_firstlineno == line:
            return code
        todo += [one for one in code.co_consts if isinstance(one, CodeType)]
    raise LookupError(name)


def changes_of(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, str, str, Change]]:
    """The possible changes of a function's body: the node, what it was, what it becomes, and what makes it so.

    Texts of errors, docstrings, annotations and the `strict` of `zip` stay: they are no arithmetic.
    """
    for owner, name, place, node in nodes_of(function):
        yield from changes_at(node, setter(owner, name, place))
        if isinstance(node, ast.stmt) and droppable(node):
            yield dropped(node, setter(owner, name, place))


def dropped(node: ast.stmt, put: Callable[[ast.AST], None]) -> tuple[ast.AST, str, str, Change]:
    """A statement goes."""
    return node, ast.unparse(node).splitlines()[0], "nothing", lambda: put(ast.copy_location(ast.Pass(), node))


def nodes_of(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """The nodes below one, each with the node, field and place that hold it."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and isinstance(
            node, ast.FunctionDef | ast.AnnAssign
        ):
            continue
        items = value if isinstance(value, list) else [value]
        for place, child in enumerate(items):
            if not isinstance(child, ast.AST) or isinstance(child, ast.Raise | ast.JoinedStr):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue
            yield node, name, place if isinstance(value, list) else None, child
            yield from nodes_of(child)


def setter(owner: ast.AST, name: str, place: int | None) -> Callable[[ast.AST], None]:
    """Puts another node in a place."""

    def put(node: ast.AST) -> None:
        if place is None:
            setattr(owner, name, node)
        else:
            getattr(owner, name)[place] = node

    return put


def droppable(node: ast.stmt) -> bool:
    """Whether a function without a statement is still one that runs."""
    if isinstance(node, ast.If):
        return not node.orelse and all(isinstance(one, ast.Raise) for one in node.body)
    if isinstance(node, ast.Assign):
        return not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
    return isinstance(node, ast.Expr | ast.AugAssign | ast.Delete | ast.Continue | ast.Break)


def changes_at(node: Any, put: Callable[[ast.AST], None]) -> Iterator[tuple[ast.AST, str, str, Change]]:
    """The changes of one expression or condition."""
    if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in SWAPPED:
        yield operator_change(node, "op", node.op)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
        ceil = ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), node.left), ast.FloorDiv(), node.right))
        yield node, ast.unparse(node), ast.unparse(ceil), lambda: put(ast.copy_location(ceil, node))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield operator_change(node, "ops", node.ops[0])
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        for number, one in enumerate(node.ops):
            yield node, f"{word(one)} in {ast.unparse(node)}", word(SWAPPED[type(one)]()), list_setter(node.ops, number)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
        other = NAMES[node.func.id]
        yield node, ast.unparse(node), other, lambda: setattr(node.func, "id", other)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        for value in (node.value + 1, node.value - 1):
            yield node, str(node.value), str(value), lambda v=value: setattr(node, "value", v)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield node, str(node.value), str(not node.value), lambda: setattr(node, "value", not node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, ast.unparse(node), ast.unparse(node.operand), lambda: put(node.operand)
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield negated(node.test, lambda new: setattr(node, "test", new))
    if isinstance(node, ast.comprehension):
        for number, test in enumerate(node.ifs):
            yield negated(test, setter(node, "ifs", number))


def operator_change(node: Any, name: str, operator: ast.AST) -> tuple[ast.AST, str, str, Change]:
    """An operator becomes another one."""
    other = SWAPPED[type(operator)]()
    change = (lambda: setattr(node, name, [other])) if name == "ops" else (lambda: setattr(node, name, other))
    return node, ast.unparse(node), word(other), change


def list_setter(operators: list[Any], number: int) -> Change:
    """Swaps one operator of a chain of comparisons."""
    return lambda: operators.__setitem__(number, SWAPPED[type(operators[number])]())


def negated(test: ast.expr, put: Callable[[ast.AST], None]) -> tuple[ast.AST, str, str, Change]:
    """A condition becomes its opposite."""
    opposite = ast.copy_location(ast.UnaryOp(ast.Not(), test), test)
    return test, ast.unparse(test), ast.unparse(opposite), lambda: put(opposite)


def word(operator: ast.AST) -> str:
    """The name of an operator."""
    return type(operator).__name__
