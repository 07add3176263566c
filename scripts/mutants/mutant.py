"""Mutant: one small change of a source file that a test should notice.

Most operators are mutmut's. Left out are changes that no behaviour depends on, or that any run notices at once: texts,
annotations, decorators, raised errors, log lines, assigned or passed None, other methods of strings. Where a number
with a fraction is compared, `<` and `<=` are the same. Of a matrix, dimensions -1 and 1 are the same: as an argument,
and in `shape[-1]`, -1 becomes -2 alone. `sort`, `argsort` and `topk` take the last dimension by default. Added are
negated conditions and comparisons, calls left out whose result is not used, and arguments left out that have a default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst
from libcst import matchers
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

_LEFT_OUT = {
    mutators.operator_string,
    mutators.operator_assignment,
    mutators.operator_augmented_assignment,
    mutators.operator_dict_arguments,
    mutators.operator_arg_removal,
    mutators.operator_symmetric_string_methods_swap,
    mutators.operator_unsymmetrical_string_methods_swap,
}
_OPERATORS = [(kind, operator) for kind, operator in mutators.mutation_operators if operator not in _LEFT_OUT]
# Nodes whose insides no behaviour depends on.
_UNCHANGED = (
    libcst.Annotation,
    libcst.BaseString,
    libcst.Decorator,
    libcst.Import,
    libcst.ImportFrom,
    libcst.Raise,
)
_UNCHANGED_CALLS = {"logger", "TypeVar", "ParamSpec"}
# `zip(strict=True)` refuses what never happens; the others say what a dataclass does with a field.
_UNCHANGED_ARGUMENTS = {"compare", "init", "kw_only", "repr", "strict"}
# Without these, a call of a library still runs.
_ARGUMENTS_WITH_DEFAULT = {"default", "dim", "key", "keepdim", "reverse", "start"}
# These take the last dimension if none is given.
_LAST_BY_DEFAULT = {"argsort", "sort", "topk"}
_OPPOSITES: dict[type[libcst.BaseCompOp], libcst.BaseCompOp] = {
    libcst.LessThan: libcst.GreaterThanEqual(),
    libcst.LessThanEqual: libcst.GreaterThan(),
    libcst.GreaterThan: libcst.LessThanEqual(),
    libcst.GreaterThanEqual: libcst.LessThan(),
}
_CONDITIONAL = (libcst.If, libcst.While, libcst.CompIf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A change of one node of a file, and the statement that holds it."""

    file: Path  # relative to the repository
    lines: range  # of the statement; of a compound one, its head
    top_name: (
        str  # the class, function or constant of the module that it is part of; empty for other statements
    )
    is_in_function: bool  # whether it takes effect when a function runs, not when its module is imported
    is_compiled: bool  # whether the function is compiled, so that nobody sees which lines run
    before: str  # code of the node, on one line
    after: str
    source: SourceFile
    node: libcst.CSTNode
    replacement: libcst.CSTNode

    def __str__(self) -> str:
        return f"{self.file}:{self.lines.start}: {self.before} -> {self.after}"

    def code(self) -> str:
        """Return the file with the change."""
        changed = self.source.module.deep_replace(self.node, self.replacement)
        assert isinstance(changed, libcst.Module)
        code: str = changed.code
        return code


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceFile:
    """A source file and its syntax tree."""

    path: Path
    text: str
    module: libcst.Module


def find_mutants(root: Path, file: Path) -> list[Mutant]:
    """Return all mutants of a file, in their order in the file."""
    text = (root / file).read_text(encoding="utf-8")
    wrapper = MetadataWrapper(libcst.parse_module(text))
    source = SourceFile(path=file, text=text, module=wrapper.module)
    return list(_Finder(root, source, wrapper.resolve(PositionProvider)).visit(wrapper.module))


class _Finder:
    """Finds the mutants of one file."""

    def __init__(self, root: Path, source: SourceFile, positions: Mapping[libcst.CSTNode, CodeRange]) -> None:
        self._source = source
        self._fractions = {
            *_constants_with_fraction(source.module),
            *_imported_fractions(root, source.module),
        }
        self._positions = positions
        self._path: list[libcst.CSTNode] = []

    def visit(self, node: libcst.CSTNode) -> Iterator[Mutant]:
        """Yield the mutants of a node and of all in it."""
        if _is_unchanged(node):
            return
        self._path.append(node)
        for replacement in _replacements(node, self._path):
            if not (isinstance(replacement, libcst.ComparisonTarget) and self._is_same(node, replacement)):
                yield self._mutant(node, replacement)
        for child in node.children:
            yield from self.visit(child)
        self._path.pop()

    def _is_same(self, node: libcst.CSTNode, replacement: libcst.ComparisonTarget) -> bool:
        """Decide whether a comparison only differs where two numbers with a fraction are equal."""
        comparison = self._path[-2]
        if not isinstance(node, libcst.ComparisonTarget) or not isinstance(comparison, libcst.Comparison):
            return False
        if type(replacement.operator) is type(_OPPOSITES.get(type(node.operator))):
            return False
        fractions = self._fractions.union(*(_fraction_parameters(part) for part in self._path))
        return type(node.operator) in _OPPOSITES and any(
            isinstance(part, libcst.Float) or (isinstance(part, libcst.Name) and part.value in fractions)
            for side in (comparison.left, node.comparator)
            for part in matchers.findall(side, matchers.Float() | matchers.Name())
        )

    def _mutant(self, node: libcst.CSTNode, replacement: libcst.CSTNode) -> Mutant:
        top = self._path[1] if len(self._path) > 1 else node
        functions = [
            function
            for function, part in zip(self._path, self._path[1:], strict=False)
            if isinstance(function, (libcst.FunctionDef, libcst.Lambda)) and part is function.body
        ]
        module = self._source.module
        return Mutant(
            file=self._source.path,
            lines=self._lines(),
            top_name=_top_name(top, self._path),
            is_in_function=bool(functions),
            is_compiled=any(
                "compiled" in module.code_for_node(decorator)
                for function in functions
                if isinstance(function, libcst.FunctionDef)
                for decorator in function.decorators
            ),
            before=" ".join(module.code_for_node(node).split()),
            after=" ".join(module.code_for_node(replacement).split()),
            source=self._source,
            node=node,
            replacement=replacement,
        )

    def _lines(self) -> range:
        """Return the lines of the innermost statement, without those of the statements in it."""
        statement = next(
            node
            for node in reversed(self._path)
            if isinstance(node, (libcst.SimpleStatementLine, libcst.BaseCompoundStatement, libcst.Module))
        )
        span = self._span(statement)
        body = getattr(statement, "body", None)
        if isinstance(body, libcst.IndentedBlock):
            return range(span.start.line, max(span.start.line + 1, self._span(body.body[0]).start.line))
        return range(span.start.line, span.end.line + 1)

    def _span(self, node: libcst.CSTNode) -> CodeRange:
        return self._positions[node]


def _is_unchanged(node: libcst.CSTNode) -> bool:
    if isinstance(node, _UNCHANGED):
        return True
    if isinstance(node, libcst.Arg):
        return node.keyword is not None and node.keyword.value in _UNCHANGED_ARGUMENTS
    if isinstance(node, libcst.Call):
        called = node.func.value if isinstance(node.func, libcst.Attribute) else node.func
        return isinstance(called, libcst.Name) and called.value in _UNCHANGED_CALLS
    return isinstance(node, libcst.If) and _names_type_checking(node.test)


def _names_type_checking(test: libcst.BaseExpression) -> bool:
    return isinstance(test, libcst.Name) and test.value == "TYPE_CHECKING"


def _constants_with_fraction(module: libcst.Module) -> Iterator[str]:
    """Yield the constants of a module that are numbers with a fraction."""
    for line in module.body:
        for statement in line.body if isinstance(line, libcst.SimpleStatementLine) else ():
            if isinstance(statement, libcst.Assign) and isinstance(statement.value, libcst.Float):
                yield from (
                    target.target.value
                    for target in statement.targets
                    if isinstance(target.target, libcst.Name)
                )


def _imported_fractions(root: Path, module: libcst.Module) -> Iterator[str]:
    """Yield the imported constants of other files of the repository that are numbers with a fraction."""
    for statement in matchers.findall(module, matchers.ImportFrom(names=[matchers.AtLeastN(n=1)])):
        assert isinstance(statement, libcst.ImportFrom)
        assert not isinstance(statement.names, libcst.ImportStar)
        dotted = "" if statement.module is None else module.code_for_node(statement.module)
        path = root / f"{dotted.replace('.', '/')}.py"
        if path.is_file():
            fractions = {*_constants_with_fraction(libcst.parse_module(path.read_text(encoding="utf-8")))}
            yield from fractions & {name.evaluated_name for name in statement.names}


def _fraction_parameters(function: libcst.CSTNode) -> set[str]:
    """Return the parameters of a function that are annotated as numbers with a fraction."""
    if not isinstance(function, libcst.FunctionDef):
        return set()
    parameters = (*function.params.params, *function.params.kwonly_params)
    is_float = matchers.Annotation(
        matchers.Name("float") | matchers.BinaryOperation(matchers.Name("float"), matchers.BitOr())
    )
    return {
        one.name.value for one in parameters if matchers.matches(one, matchers.Param(annotation=is_float))
    }


def _replacements(node: libcst.CSTNode, path: Sequence[libcst.CSTNode]) -> Iterator[libcst.CSTNode]:
    """Yield the changes of a node; `path` leads from the module to it."""
    parent = path[-2] if len(path) > 1 else None
    for kind, operator in _OPERATORS:
        if isinstance(node, kind) and not _is_last_dimension(node, path):
            yield from operator(node)
    if isinstance(node, libcst.Call):
        yield from _without_argument(node)
    is_condition = isinstance(parent, _CONDITIONAL) and node is parent.test
    if is_condition and not isinstance(node, (libcst.Comparison, libcst.UnaryOperation)):
        yield _negate(node)
    if isinstance(node, libcst.ComparisonTarget) and type(node.operator) in _OPPOSITES:
        yield node.with_changes(operator=_OPPOSITES[type(node.operator)])
    if (
        isinstance(node, libcst.Expr)
        and isinstance(node.value, libcst.Call)
        and not _is_unchanged(node.value)
    ):
        yield libcst.Pass(semicolon=node.semicolon)


def _without_argument(call: libcst.Call) -> Iterator[libcst.Call]:
    """Leave out each argument in turn that has a default."""
    takes_last = isinstance(call.func, libcst.Attribute) and call.func.attr.value in _LAST_BY_DEFAULT
    for index, argument in enumerate(call.args):
        if argument.keyword is None or argument.keyword.value not in _ARGUMENTS_WITH_DEFAULT:
            continue
        if not (takes_last and argument.keyword.value == "dim" and _is_last(argument.value)):
            yield call.with_changes(args=[*call.args[:index], *call.args[index + 1 :]])


def _is_last_dimension(node: libcst.CSTNode, path: Sequence[libcst.CSTNode]) -> bool:
    """Decide whether a node is -1 as an argument, or in `shape[-1]`."""
    is_of_shape = len(path) > 3 and matchers.matches(
        path[-4], matchers.Subscript(matchers.Attribute(attr=matchers.Name("shape")))
    )
    return _is_last(node) and (isinstance(path[-2], libcst.Arg) or is_of_shape)


def _is_last(node: libcst.CSTNode) -> bool:
    """Decide whether a node is -1, the last dimension."""
    return matchers.matches(node, matchers.UnaryOperation(matchers.Minus(), matchers.Integer("1")))


def _negate(test: libcst.CSTNode) -> libcst.BaseExpression:
    assert isinstance(test, libcst.BaseExpression)
    inner = test.with_changes(lpar=[libcst.LeftParen(), *test.lpar], rpar=[*test.rpar, libcst.RightParen()])
    return libcst.UnaryOperation(operator=libcst.Not(), expression=inner)


def _top_name(statement: libcst.CSTNode, path: Sequence[libcst.CSTNode]) -> str:
    """Return the name that a statement of the module defines; of several, the one whose value is on the path."""
    name: libcst.CSTNode | None = None
    if isinstance(statement, (libcst.FunctionDef, libcst.ClassDef)):
        name = statement.name
    elif isinstance(statement, libcst.SimpleStatementLine):
        first = statement.body[0]
        if isinstance(first, libcst.Assign):
            name = first.targets[0].target
            if isinstance(name, libcst.Tuple) and isinstance(first.value, libcst.Tuple):
                pairs = zip(name.elements, first.value.elements, strict=True)
                name = next((target.value for target, value in pairs if value in path), None)
        elif isinstance(first, libcst.AnnAssign):
            name = first.target
    return str(name.value) if isinstance(name, libcst.Name) else ""
