"""The mutants of a module: cosmic-ray's operators, and three further operators."""

import ast
import itertools
import types

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator
from parso.python.tree import Keyword


class _PointOperator(Operator):
    """An operator with a mutant for each point of a node, which `points` returns."""

    def mutation_positions(self, node):
        return [(point.start_pos, point.end_pos) for point in self.points(node)]

    @classmethod
    def examples(cls):
        return ()


class DropStatement(_PointOperator):
    """Replace a statement of a function by `pass`, except statements without which later lines would fail."""

    EXCLUDED = ("string", "strings", "operator", "import_name", "import_from", "global_stmt", "nonlocal_stmt")

    def points(self, node):
        function = node.type == "simple_stmt" and parso.tree.search_ancestor(node, "funcdef")
        return [node.children[0]] if function and self._can_drop(node.children[0], function) else []

    def _can_drop(self, statement, function):
        if statement.type != "expr_stmt":
            return statement.type not in self.EXCLUDED and statement != "pass"
        target = statement.children[0]
        if target.type == "name" and statement.children[1] == "=":
            names = [name for name in ast_nodes(function) if name.type == "name" and name.value == target.value]
            return sum(name.is_definition() for name in names) > 1
        return target.type in ("name", "atom_expr") and statement.children[1].type != "annassign"

    def mutate(self, node, index):
        first = node.get_first_leaf()
        node.children[0] = Keyword("pass", first.start_pos, first.prefix)
        return node


class SwapArguments(_PointOperator):
    """Swap two neighbouring positional arguments of a call."""

    SYMMETRIC = {"max", "min", "maximum", "minimum", "logical_and", "logical_or", "isinstance", "issubclass"}

    def points(self, node):
        call = node.type == "arglist" and node.parent.type == "trailer" and node.parent.children[0] == "("
        if not call or node.parent.get_previous_leaf().value in self.SYMMETRIC:
            return []
        pairs = itertools.pairwise(node.children[::2])
        return [
            left
            for left, right in pairs
            if "argument" not in (left.type, right.type) and left.get_code() != right.get_code()
        ]

    def mutate(self, node, index):
        left = node.children.index(self.points(node)[index])
        first, second = node.children[left].get_first_leaf(), node.children[left + 2].get_first_leaf()
        first.prefix, second.prefix = second.prefix, first.prefix
        node.children[left], node.children[left + 2] = node.children[left + 2], node.children[left]
        return node


class DropFinally(_PointOperator):
    """Run a `finally` block only if the `try` block does not raise or return."""

    def points(self, node):
        can_mutate = node.type == "try_stmt" and "else" not in node.children
        return [child for child in node.children if child == "finally"] if can_mutate else []

    def mutate(self, node, index):
        (leaf,) = self.points(node)
        column = " " * leaf.start_pos[1]
        has_except = any(child.type == "except_clause" or child == "except" for child in node.children)
        leaf.value = "else" if has_except else f"except ():\n{column}    raise\n{column}else"
        return node


_COMPARISONS = ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")
_CONSTANTS = ("NumberReplacer", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue")
_BOOLEANS = ("ReplaceAndWithOr", "ReplaceOrWithAnd", "AddNot", "ReplaceUnaryOperator_Delete_Not")
_COSMIC_RAY = (*(f"ReplaceComparisonOperator_{name}" for name in _COMPARISONS), *_CONSTANTS, *_BOOLEANS)
OPERATORS = [*(get_operator(f"core/{name}")() for name in _COSMIC_RAY), DropStatement(), SwapArguments(), DropFinally()]


def places(source):
    """List the mutants of a source: pairs of an operator and a number among the mutants of the operator."""
    nodes = list(ast_nodes(get_ast(source)))
    counts = [sum(len(list(operator.mutation_positions(node))) for node in nodes) for operator in OPERATORS]
    return [(operator, number) for operator, count in zip(OPERATORS, counts, strict=True) for number in range(count)]


class _WithoutOverloads(ast.NodeTransformer):
    def visit_FunctionDef(self, node):
        return None if any("overload" in ast.unparse(decorator) for decorator in node.decorator_list) else node


def meaning(source):
    """Return the bytecode of a source without positions and overloads, so that two spellings of a program are equal."""

    def bytecode(code):
        constants = [bytecode(value) if isinstance(value, types.CodeType) else repr(value) for value in code.co_consts]
        return code.co_code, code.co_names, code.co_varnames, code.co_exceptiontable, *constants

    return bytecode(compile(_WithoutOverloads().visit(ast.parse(source)), "", "exec"))


__all__ = ["meaning", "mutate_code", "places"]
