"""The interpreter of `range_report`: it runs equations one by one, and measures the result of each."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from lossscale_core.adapters import OperationRange, Progress
from lossscale_jax._attach import attaches, reads_scale, scopes

_INSTALLED = str(Path(jax.__file__).parents[1])
_LIBRARIES = tuple(str(folder) for folder in (Path(jax.__file__).parent, Path(__file__).parent))
_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}
"""Primitives that run the equations within them once."""
_REMATTED = "rematted_computation"
"""The scope that JAX puts around operations that the backward pass repeats."""
_MOVES = {
    *("broadcast_in_dim", "concatenate", "copy", "copy_p", "dynamic_slice", "dynamic_update_slice", "expand_dims"),
    *("optimization_barrier", "pad", "reshape", "rev", "slice", "split", "squeeze", "stop_gradient", "transpose"),
}
"""Primitives that copy a constant, or an array that was measured already."""


class Tracked(NamedTuple):
    """An array, and whether the loss scale is a factor of it."""

    array: Any
    is_scaled: bool


class _Place(NamedTuple):
    """The place of an equation: the scopes and iterations around it, and the line of its source."""

    path: str = ""
    has_scope: bool = False
    line: str = ""

    def of(self, eqn: JaxprEqn) -> "_Place":
        names = [each for each in scopes(eqn) if each != _REMATTED]
        path = "/".join([self.path, *names] if self.path else names)
        has_scope = self.has_scope or bool(names)
        return _Place(path, has_scope, "" if has_scope else _line(eqn) or self.line)

    def iteration(self, index: int) -> "_Place":
        return self._replace(path=f"{self.path or 'scan'}[{index}]")

    @property
    def name(self) -> str:
        return self.path if self.has_scope else "/".join(filter(None, (self.path, self.line))) or "fun"


class Interpreter:
    """Run equations eagerly, track which values the loss scale multiplies, and record those of low precision."""

    def __init__(self) -> None:
        self._records: list[OperationRange] | None = []
        self._loss_scale: float | None = None
        self._progress = Progress()
        self._loops: dict[str, Callable[[JaxprEqn, list[Tracked], _Place], list[Tracked]]] = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
        }

    def run(
        self, jaxpr: Jaxpr, inputs: Sequence[Tracked], loss_scale: float | None = None
    ) -> tuple[list[Tracked], list[OperationRange]]:
        """Return the outputs of the equations, and the records of their operations.

        Attached losses are scaled by `loss_scale`; in the forward pass, for which it is None, by their own states.
        """
        records: list[OperationRange] = []
        return self._run(jaxpr, inputs, loss_scale, records), records

    def compute(self, jaxpr: Jaxpr, inputs: Sequence[Tracked], loss_scale: float) -> list[Tracked]:
        """Return the outputs of the equations as `run` does, and record nothing."""
        return self._run(jaxpr, inputs, loss_scale, None)

    def _run(
        self, jaxpr: Jaxpr, inputs: Sequence[Tracked], loss_scale: float | None, records: list[OperationRange] | None
    ) -> list[Tracked]:
        self._records, self._loss_scale = records, loss_scale
        outputs = self._evaluate(jaxpr, inputs, _Place())
        self._progress.end()
        return outputs

    def _evaluate(self, jaxpr: Any, inputs: Sequence[Tracked], place: _Place) -> list[Tracked]:
        consts: list[Any] = []
        if isinstance(jaxpr, ClosedJaxpr):
            jaxpr, consts = jaxpr.jaxpr, jaxpr.consts
        known = dict(zip(jaxpr.constvars, (Tracked(const, False) for const in consts), strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))
        equations = live_equations(jaxpr)
        ends = _last_uses(equations, jaxpr.outvars)
        for eqn in equations:
            given = [_read(known, each) for each in eqn.invars]
            known.update(zip(eqn.outvars, self._equation(jaxpr, eqn, given, place.of(eqn)), strict=True))
            del given  # otherwise the operands of this equation stay in memory while the next one runs
            for each in ends.get(id(eqn), ()):
                known.pop(each, None)
        return [_read(known, each) for each in jaxpr.outvars]

    def _equation(self, jaxpr: Jaxpr, eqn: JaxprEqn, given: list[Tracked], place: _Place) -> list[Tracked]:
        name = eqn.primitive.name
        if self._loss_scale is not None and reads_scale(eqn):
            aval: Any = eqn.outvars[0].aval
            return [Tracked(jnp.full(aval.shape, self._loss_scale, aval.dtype), True)]
        if name in self._loops:
            return self._loops[name](eqn, given, place)
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")) if name in _CALLS else None
        return self._apply(jaxpr, eqn, given, place) if inner is None else self._evaluate(inner, given, place)

    def _scan(self, eqn: JaxprEqn, given: list[Tracked], place: _Place) -> list[Tracked]:
        """Run the body once for each element, in Python, so that a record can name its iteration."""
        params, body = eqn.params, eqn.params["jaxpr"].jaxpr
        # The parameters for the numbers of constants and carried values have other names in each version of JAX.
        n_sequences = _count_longer(eqn.invars, body.invars)
        n_carry = len(eqn.outvars) - _count_longer(eqn.outvars, body.outvars)
        consts, carry, sequences = _split(given, len(given) - n_sequences - n_carry, n_carry)
        rows: list[list[Tracked]] = []
        for index in range(params["length"])[:: -1 if params["reverse"] else 1]:
            elements = [_element(each, index) for each in sequences]
            results = self._evaluate(params["jaxpr"], [*consts, *carry, *elements], place.iteration(index))
            carry, row = results[:n_carry], results[n_carry:]
            rows.append(row)
        ordered = rows[::-1] if params["reverse"] else rows
        stacked = [_stack([row[n] for row in ordered], var) for n, var in enumerate(eqn.outvars[n_carry:])]
        return [*carry, *stacked]

    def _while(self, eqn: JaxprEqn, given: list[Tracked], place: _Place) -> list[Tracked]:
        params = eqn.params
        of_test, of_body, carry = _split(given, params["cond_nconsts"], params["body_nconsts"])
        # Under vmap the test has an element for each example, and the loop continues while any of them is true.
        while self._evaluate(params["cond_jaxpr"], [*of_test, *carry], place)[0].array.any():
            carry = self._evaluate(params["body_jaxpr"], [*of_body, *carry], place)
        return carry

    def _cond(self, eqn: JaxprEqn, given: list[Tracked], place: _Place) -> list[Tracked]:
        index, *operands = given
        branches = eqn.params["branches"]
        chosen = min(max(int(index.array), 0), len(branches) - 1)
        results = self._evaluate(branches[chosen], operands, place)
        return [each._replace(is_scaled=each.is_scaled or index.is_scaled) for each in results]

    def _apply(self, jaxpr: Jaxpr, eqn: JaxprEqn, given: list[Tracked], place: _Place) -> list[Tracked]:
        """Run an equation without inner equations, and record its result."""
        if self._loss_scale is not None and attaches(eqn):  # such as a `shard_map`, which runs as a whole
            eqn = _with_scale(eqn, self._loss_scale)
        inputs = {var: each.array for var, each in zip(eqn.invars, given, strict=True) if not isinstance(var, Literal)}
        alone = jaxpr.replace(constvars=[], invars=[*inputs], outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects)
        is_scaled = any(each.is_scaled for each in given)
        # `primitive.bind` would run it without the mesh and the other settings under which the equation was traced.
        results = [Tracked(each, is_scaled) for each in _run_alone(alone, inputs.values())]
        if eqn.primitive.name not in _MOVES:
            for each in results:
                if is_low_precision(each.array):
                    self._record(eqn.primitive.name, given, each, place)
        self._progress.step()
        return results

    def _record(self, operation: str, given: list[Tracked], result: Tracked, place: _Place) -> None:
        if self._records is None:
            return
        record = measure(result.array, operation, place.name)
        overflowed = bool(record.nonfinite) and all(is_finite(each.array) for each in given)
        self._records.append(record._replace(overflowed=overflowed, scaled=result.is_scaled))


def _run_alone(jaxpr: Jaxpr, inputs: Iterable[Any]) -> list[Any]:
    """Run one equation; if the device refuses the algorithm of a product, use the default algorithm."""
    operands = list(inputs)
    try:
        return jax.core.eval_jaxpr(jaxpr, (), *operands)
    except (ValueError, RuntimeError):
        (eqn,) = jaxpr.eqns
        if not isinstance(eqn.params.get("precision"), lax.DotAlgorithm | lax.DotAlgorithmPreset):
            raise
        # As `jax.nn.dot_product_attention` does when it is not within `jit`:
        # https://github.com/jax-ml/jax/blob/jax-v0.7.2/jax/_src/nn/functions.py
        default = eqn.replace(params={**eqn.params, "precision": None})
        return jax.core.eval_jaxpr(jaxpr.replace(eqns=[default]), (), *operands)


def live_equations(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Return the equations that an output needs, or that have an effect, such as `jax.debug.print`."""
    needed = {each for each in jaxpr.outvars if isinstance(each, Var)}
    equations = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed |= {each for each in eqn.invars if isinstance(each, Var)}
            equations.append(eqn)
    return equations[::-1]


def _with_scale(eqn: JaxprEqn, loss_scale: float) -> JaxprEqn:
    """Return an equation in which attached losses are scaled by `loss_scale`."""
    if reads_scale(eqn):
        avals: list[Any] = [each.aval for each in eqn.invars]
        return eqn.replace(invars=[Literal(jnp.full(a.shape, loss_scale, a.dtype), a) for a in avals])

    def replaced(param: Any) -> Any:
        if isinstance(param, tuple):
            return tuple(map(replaced, param))
        if isinstance(param, ClosedJaxpr):
            return ClosedJaxpr(replaced(param.jaxpr), param.consts)
        if isinstance(param, Jaxpr):
            return param.replace(eqns=[_with_scale(each, loss_scale) for each in param.eqns])
        return param

    return eqn.replace(params={name: replaced(param) for name, param in eqn.params.items()}) if attaches(eqn) else eqn


def measure(array: jax.Array, operation: str, module: str) -> OperationRange:
    """Return the record of an array of floats that is not empty. Synchronises."""
    # On the host, since XLA would recompile for each shape.
    return OperationRange.of(jax.device_get(array), operation, module)


def is_low_precision(array: Any) -> bool:
    """Return whether an array holds signed floats of fewer bits than float32, and is not empty."""
    dtype = jnp.result_type(array)
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return bool(is_narrow and dtype != jnp.float8_e8m0fnu and jnp.size(array))


def is_finite(array: Any) -> bool:
    """Return whether no element of an array is NaN or infinite. Synchronises."""
    return not jnp.issubdtype(jnp.result_type(array), jnp.inexact) or bool(jnp.isfinite(array).all())


def _read(known: dict[Var, Tracked], atom: Any) -> Tracked:
    if not isinstance(atom, Literal):
        return known[atom]
    aval: Any = atom.aval
    return Tracked(atom.val if hasattr(atom.val, "dtype") else jnp.asarray(atom.val, aval.dtype), False)


def _last_uses(equations: Sequence[JaxprEqn], outvars: Sequence[Any]) -> dict[int, list[Var]]:
    """Return the values to drop after each equation, so that memory is freed as in a compiled step."""
    last = {var: id(eqn) for eqn in equations for var in (*eqn.invars, *eqn.outvars) if isinstance(var, Var)}
    kept = {each for each in outvars if isinstance(each, Var)}
    ends: dict[int, list[Var]] = {}
    for var, equation in last.items():
        if var not in kept:
            ends.setdefault(equation, []).append(var)
    return ends


def _count_longer(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    """Return how many values of a scan have one axis more than in its body: elements of inputs, or stacked outputs."""
    return sum(len(each.aval.shape) > len(other.aval.shape) for each, other in zip(outer, inner, strict=True))


def _split(given: list[Tracked], first: int, second: int) -> tuple[list[Tracked], list[Tracked], list[Tracked]]:
    return given[:first], given[first : first + second], given[first + second :]


def _element(sequence: Tracked, index: int) -> Tracked:
    return Tracked(lax.dynamic_index_in_dim(sequence.array, index, keepdims=False), sequence.is_scaled)


def _stack(elements: list[Tracked], var: Any) -> Tracked:
    is_scaled = any(each.is_scaled for each in elements)
    if not elements:
        return Tracked(jnp.zeros(var.aval.shape, var.aval.dtype), is_scaled)
    return Tracked(jnp.stack([each.array for each in elements]), is_scaled)


def _line(eqn: JaxprEqn) -> str:
    """Return the innermost source line outside of installed packages, or else the innermost line."""
    traceback: Any = eqn.source_info.traceback
    if traceback is None:
        return ""
    frames = [each for each in traceback.frames if not each.file_name.startswith(_LIBRARIES)]
    own = [each for each in frames if not each.file_name.startswith(_INSTALLED)]
    for frame in own or frames:
        return f"{Path(frame.file_name).name}:{frame.line_num} ({frame.function_name.rpartition('.')[2]})"
    return ""
