"""Mutants of a source file: every small change to its code that a test should notice, found with `ast`.

Left out is what no test should be tied to: annotations, docstrings, f-strings and all other texts (tests match the
messages), imports, `__all__` and versions. Also left out are changes that fail in any use, which prove nothing of the
tests: without the first assignment of a name, without the last `return` of a function, `isinstance` with its arguments
exchanged. Nor is the order of the arguments of `max` and `min`. A mutant has the lines of the original: what is shorter
is filled up with line breaks.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

__all__: list[str] = []

OPPOSITES: dict[type[ast.AST], tuple[str, str]] = {  # how an operator is written, and what stands there instead
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: (r"\*\*", "*"),
}
KINDS = ("comparison", "condition", "dropped statement", "arithmetic", "exchanged arguments", "constant")
NESTED = (ast.If, ast.For, ast.While, ast.ExceptHandler)
NO_LOCK = '__import__("contextlib").nullcontext()'


class Mutant(NamedTuple):
    """One change. Its name is its file, function and change; the line is only where that is today."""

    file: str
    function: str
    change: str  # the changed lines, as they are and as they would be
    line: int
    kind: str
    begin: int  # in the encoded text of the file
    end: int
    text: str  # what stands between them instead
    reached: frozenset[str]  # statements, as "file:line": a test that runs one of them covers the mutant

    def __str__(self) -> str:
        return f"{self.file}: {self.function}: {self.change}"

    def applied(self, source: str) -> str:
        """Return the text of the file with the change."""
        encoded = source.encode()
        return (encoded[: self.begin] + self.text.encode() + encoded[self.end :]).decode()


def is_text(node: ast.AST) -> bool:
    """Return whether an expression is a text, or one that is put together."""
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


class _Finder:
    """Walks through a file and notes the changes, as (statement, function, kind, begin, end, text instead)."""

    def __init__(self, source: str, tree: ast.Module) -> None:
        self.bytes = source.encode()
        self.starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[tuple[ast.stmt, str, str, int, int, str]] = []
        self.parents: list[Any] = []
        self.names: list[str] = []  # of the classes and functions around
        self.bound: list[set[str]] = [set()]  # the names that the function, or module, has bound so far
        self.walk(tree)

    def lines_around(self, begin: int, end: int) -> tuple[int, int]:
        """Return where the lines of a piece of the text begin and end."""
        return self.starts[bisect_right(self.starts, begin) - 1], self.starts[bisect_left(self.starts, end)]

    def begin(self, node: Any) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: Any) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        return self.bytes[self.begin(node) : self.end(node)].decode()

    def note(self, kind: str, begin: int, end: int, text: str) -> None:
        missing = self.bytes[begin:end].count(b"\n") - text.count("\n")
        statement = next(node for node in reversed(self.parents) if isinstance(node, ast.stmt))
        self.found.append((statement, ".".join(self.names) or "module", kind, begin, end, text + "\n" * missing))

    def replace(self, kind: str, node: ast.AST, text: str) -> None:
        missing = self.text(node).count("\n") - text.count("\n")
        if missing and isinstance(node, ast.expr):
            text = (
                f"({text}{missing * chr(10)})"  # What goes on over several lines may have done so without parentheses.
            )
        self.note(kind, self.begin(node), self.end(node), text)

    def walk(self, node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom) or self.is_left_out(node):
            return
        is_scope = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        self.parents.append(node)
        if is_scope:
            self.names.append(node.name)
            self.bound.append({argument.arg for argument in ast.walk(node) if isinstance(argument, ast.arg)})
        self.change(node)
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.walk(child)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self.bound[-1].add(node.id)
        if is_scope:
            self.names.pop()
            self.bound.pop()
        self.parents.pop()

    def is_left_out(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            return self.text(node).startswith("__")
        if isinstance(node, ast.keyword):
            return node.arg == "strict"  # of `zip`: it asserts that lengths are equal, which are
        return isinstance(node, ast.If) and self.text(node.test) == "TYPE_CHECKING"

    def change(self, node: ast.AST) -> None:
        changes = getattr(self, f"change_{type(node).__name__}", None)
        if changes is not None:
            changes(node)

    def change_operator(self, kind: str, left: ast.AST, operator: ast.AST, right: ast.AST) -> None:
        if type(operator) in OPPOSITES:
            pattern, instead = OPPOSITES[type(operator)]
            match = re.search(pattern.encode(), self.bytes[self.end(left) : self.begin(right)])
            assert match is not None
            self.note(kind, self.end(left) + match.start(), self.end(left) + match.end(), instead)

    def change_Compare(self, node: ast.Compare) -> None:
        for (left, right), operator in zip(pairwise([node.left, *node.comparators]), node.ops, strict=True):
            self.change_operator("comparison", left, operator, right)

    def change_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in pairwise(node.values):
            self.change_operator("condition", left, node.op, right)
        for value in node.values:
            self.replace("condition", value, str(isinstance(node.op, ast.And)))

    def change_UnaryOp(self, node: ast.UnaryOp) -> None:
        begin = self.begin(node)
        if isinstance(node.op, ast.Not):
            self.note("condition", begin, begin + len("not "), "")
        elif isinstance(node.op, ast.USub):
            self.note("arithmetic", begin, begin + len("-"), "")

    def change_If(self, node: ast.If | ast.IfExp) -> None:
        for constant in ("True", "False"):
            self.replace("condition", node.test, constant)

    change_IfExp = change_If

    def change_While(self, node: ast.While) -> None:
        self.replace("condition", node.test, "False")

    def change_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            for constant in ("True", "False"):
                self.replace("condition", test, constant)

    def change_BinOp(self, node: ast.BinOp) -> None:
        if not is_text(node):
            self.change_operator("arithmetic", node.left, node.op, node.right)

    def change_AugAssign(self, node: ast.AugAssign) -> None:
        if not is_text(node.value):
            self.change_operator("arithmetic", node.target, node.op, node.value)
        self.replace("dropped statement", node, "pass")

    def change_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass", "max", "min"):
            return
        for one, other in pairwise(node.args):
            if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred):
                between = self.bytes[self.end(one) : self.begin(other)].decode()
                text = self.text(other) + between + self.text(one)
                self.note("exchanged arguments", self.begin(one), self.end(other), text)

    def change_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace("constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self.replace("constant", node, str(node.value + 1))
        elif isinstance(node.value, float):
            self.replace("constant", node, str(2 * node.value or 1.0))

    def change_With(self, node: ast.With) -> None:
        for item in node.items:
            if item.optional_vars is None:
                self.replace("dropped statement", item.context_expr, NO_LOCK)

    def change_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            names = {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
            if isinstance(target, ast.Attribute | ast.Subscript) or names <= self.bound[-1]:
                self.replace("dropped statement", node, "pass")
                return

    def change_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom):
            self.replace("dropped statement", node, "pass")

    def change_Return(self, node: ast.Return) -> None:
        function = max(i for i, parent in enumerate(self.parents) if isinstance(parent, ast.FunctionDef))
        if any(isinstance(parent, NESTED) for parent in self.parents[function:]):
            self.replace("dropped statement", node, "pass")

    def change_statement(self, node: ast.stmt) -> None:
        self.replace("dropped statement", node, "pass")

    change_Raise = change_Delete = change_Continue = change_Break = change_For = change_statement


class _Reached:
    """Knows which statements, as "file:line", lead to a change in a statement."""

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self.at_import: set[ast.stmt] = set()
        self.using: dict[str, set[str]] = defaultdict(set)  # by name, the statements that use it
        for file, tree in trees.items():
            self.at_import.update(_at_import(tree))
            for statement in _statements(tree):
                for part in _own_parts(statement):
                    name = part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", None)
                    if name is not None:
                        self.using[name] |= self.inside(file, statement)

    def inside(self, file: str, statement: ast.stmt) -> set[str]:
        """Return a statement, and those in it if it is a function: its defaults are evaluated once, and used there."""
        inner = _statements(statement) if isinstance(statement, ast.FunctionDef) else ()
        return {f"{file}:{part.lineno}" for part in (statement, *inner)}

    def by(self, file: str, statement: ast.stmt) -> frozenset[str]:
        """Return the statement; of what may run at import and gives something a name, also those that use the name."""
        found = self.inside(file, statement)
        if statement in self.at_import and isinstance(statement, ast.Assign | ast.AnnAssign):
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                if isinstance(target, ast.Name):
                    found |= self.using[target.id]
        return frozenset(found)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    return (part for part in ast.walk(node) if isinstance(part, ast.stmt) and part is not node)


def _at_import(tree: ast.AST) -> Iterator[ast.stmt]:
    for part in ast.iter_child_nodes(tree):
        if isinstance(part, ast.stmt) and not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield part
            yield from _at_import(part)


def _own_parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """Return the expressions of a statement, without those of the statements in it."""
    for part in ast.iter_child_nodes(statement):
        if not isinstance(part, ast.stmt | ast.ExceptHandler):
            yield from ast.walk(part)


def mutants_of(sources: dict[str, str]) -> list[Mutant]:
    """Return all mutants of the given files, in a fixed order. Of those with the same text, the first is kept."""
    trees = {file: ast.parse(source) for file, source in sources.items()}
    mutants, reached = [], _Reached(trees)
    for file, source in sorted(sources.items()):
        finder = _Finder(source, trees[file])
        known, times = {finder.bytes}, Counter[tuple[str, str]]()
        for statement, function, kind, begin, end, text in finder.found:
            changed = finder.bytes[:begin] + text.encode() + finder.bytes[end:]
            if changed in known:
                continue
            known.add(changed)
            first, after = finder.lines_around(begin, end)
            words = finder.bytes[first:begin], text.strip().encode(), finder.bytes[end:after]
            before, instead = (" ".join(part.decode().split()) for part in (finder.bytes[first:after], b"".join(words)))
            change = f"`{before}` -> `{instead}`"
            times[function, change] += 1
            if times[function, change] > 1:  # the same words are in the function again
                change += f" #{times[function, change]}"
            line, covering = finder.starts.index(first) + 1, reached.by(file, statement)
            mutants.append(Mutant(file, function, change, line, kind, begin, end, text, covering))
    return mutants
