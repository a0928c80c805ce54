"""The mutants of a module: cosmic-ray's operators, and three that it lacks."""

import ast
import itertools
import types

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator
from parso.python.tree import Keyword


class _Ours(Operator):
    """An operator that mutates each of its nodes in one way for each of its points."""

    def mutation_positions(self, node):
        return [(point.start_pos, point.end_pos) for point in self.points(node)]

    @classmethod
    def examples(cls):
        return ()


class DropStatement(_Ours):
    """Replace a statement of a function by `pass`, unless each later use of a name would fail without it."""

    KEPT = ("string", "strings", "operator", "import_name", "import_from", "global_stmt", "nonlocal_stmt")

    def points(self, node):
        function = node.type == "simple_stmt" and parso.tree.search_ancestor(node, "funcdef")
        return [node.children[0]] if function and self._can_go(node.children[0], function) else []

    def _can_go(self, statement, function):
        if statement.type != "expr_stmt":
            return statement.type not in self.KEPT and statement != "pass"
        target = statement.children[0]
        if target.type == "name" and statement.children[1] == "=":
            names = [each for each in ast_nodes(function) if each.type == "name" and each.value == target.value]
            return sum(each.is_definition() for each in names) > 1
        return target.type in ("name", "atom_expr") and statement.children[1].type != "annassign"

    def mutate(self, node, index):
        first = node.get_first_leaf()
        node.children[0] = Keyword("pass", first.start_pos, first.prefix)
        return node


class SwapArguments(_Ours):
    """Swap two neighbouring positional arguments of a call."""

    SYMMETRIC = {"max", "min", "maximum", "minimum", "logical_and", "logical_or", "isinstance", "issubclass"}

    def points(self, node):
        call = node.type == "arglist" and node.parent.type == "trailer" and node.parent.children[0] == "("
        if not call or node.parent.get_previous_leaf().value in self.SYMMETRIC:
            return []
        given = node.children[::2]
        pairs = itertools.pairwise(given)
        return [
            one for one, two in pairs if "argument" not in (one.type, two.type) and one.get_code() != two.get_code()
        ]

    def mutate(self, node, index):
        one = node.children.index(self.points(node)[index])
        first, second = node.children[one].get_first_leaf(), node.children[one + 2].get_first_leaf()
        first.prefix, second.prefix = second.prefix, first.prefix
        node.children[one], node.children[one + 2] = node.children[one + 2], node.children[one]
        return node


class DropFinally(_Ours):
    """Run a `finally` block only where nothing was raised or returned before its end."""

    def points(self, node):
        is_ours = node.type == "try_stmt" and "else" not in node.children
        return [each for each in node.children if each == "finally"] if is_ours else []

    def mutate(self, node, index):
        (leaf,) = self.points(node)
        column = " " * leaf.start_pos[1]
        has_except = any(each.type == "except_clause" or each == "except" for each in node.children)
        leaf.value = "else" if has_except else f"except ():\n{column}    raise\n{column}else"
        return node


_COMPARISONS = ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")
_CONSTANTS = ("NumberReplacer", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue")
_BOOLEANS = ("ReplaceAndWithOr", "ReplaceOrWithAnd", "AddNot", "ReplaceUnaryOperator_Delete_Not")
_THEIRS = (*(f"ReplaceComparisonOperator_{each}" for each in _COMPARISONS), *_CONSTANTS, *_BOOLEANS)
OPERATORS = [*(get_operator(f"core/{each}")() for each in _THEIRS), DropStatement(), SwapArguments(), DropFinally()]


def places(source):
    """List the mutants of a source: the operator of each, and its number among those of the operator."""
    nodes = list(ast_nodes(get_ast(source)))
    counts = [sum(len(list(operator.mutation_positions(node))) for node in nodes) for operator in OPERATORS]
    return [(operator, number) for operator, count in zip(OPERATORS, counts, strict=True) for number in range(count)]


class _WithoutOverloads(ast.NodeTransformer):
    def visit_FunctionDef(self, node):
        return None if any("overload" in ast.unparse(each) for each in node.decorator_list) else node


def meaning(source):
    """Return the bytecode of a source without positions, so that two spellings of one program are equal.

    An overload is a type for checkers; its defaults and its body are never read.
    """

    def of(code):
        constants = [of(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
        return code.co_code, code.co_names, code.co_varnames, code.co_exceptiontable, *constants

    return of(compile(_WithoutOverloads().visit(ast.parse(source)), "", "exec"))


__all__ = ["meaning", "mutate_code", "places"]
