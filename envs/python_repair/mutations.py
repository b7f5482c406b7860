"""Breaking a function in one place: every way there is, in the order of the syntax tree."""

import ast
from collections.abc import Callable, Iterator
from copy import deepcopy

_OTHER_COMPARISON: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OTHER_OPERATOR: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.FloorDiv, ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip

Change = Callable[[ast.AST], None]


def broken_versions(source: str) -> list[str]:
    """The source of one function, once for each single mistake: a wrong operator, comparison, constant or result."""
    tree = ast.parse(source)
    versions: list[str] = []
    for index, node in enumerate(ast.walk(tree)):
        for change in _changes(node):
            copy = deepcopy(tree)
            change(list(ast.walk(copy))[index])
            versions.append(ast.unparse(copy))
    return versions


def _changes(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare(ops=[comparison]) if type(comparison) in _OTHER_COMPARISON:
            yield _set("ops", [_OTHER_COMPARISON[type(comparison)]()])
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator) if type(operator) in _OTHER_OPERATOR:
            yield _set("op", _OTHER_OPERATOR[type(operator)]())
        case ast.BoolOp(op=ast.And()):
            yield _set("op", ast.Or())
        case ast.BoolOp(op=ast.Or()):
            yield _set("op", ast.And())
        case ast.Constant(value=bool() as value):
            yield _set("value", not value)
        case ast.Constant(value=int() as value):
            yield _set("value", value + 1)
            if value > 0:
                yield _set("value", value - 1)
        case ast.Call(func=ast.Name(id="max" | "min" as name)):
            yield _set("func", ast.Name(id="min" if name == "max" else "max", ctx=ast.Load()))
        case ast.Return(value=ast.Name()):
            yield _set("value", ast.Constant(value=None))


def _set(field: str, value: object) -> Change:
    def change(node: ast.AST) -> None:
        setattr(node, field, value)

    return change
