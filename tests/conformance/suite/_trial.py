"""One adapter with one way of running: functions that make its arrays and compare its results."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lossscale_core.adapters import tree
from tests.conformance.suite._adapter import Adapter, Way

_WIDEST = {"b": np.bool_, "i": np.int32, "u": np.int32, "f": np.float64, "c": np.complex128}
LIFTED = {"float16": "float32", "bfloat16": "float32", "int32": "float32"}
"""The dtypes of scaled losses and unscaled gradients of narrower dtypes; other dtypes stay as they are."""


class Trial:
    """An adapter and one of its ways of running."""

    def __init__(self, adapter: Adapter, way: Way) -> None:
        self.adapter = adapter
        self.way = way

    def array(self, values: Any, dtype: str) -> Any:
        """Return the adapter's array of these values."""
        values = np.asarray(values)
        return self.adapter.asarray(values.astype(_WIDEST[values.dtype.kind]), dtype)

    def flag(self, value: bool) -> Any:
        """Return the adapter's flag of shape `()`."""
        return self.array(value, "bool")

    def state(self, policy: Any) -> Any:
        """Return a policy's first state in the adapter's arrays."""
        return self.adapter.verbs.init_state(policy, **self.adapter.placement)

    def update(self, policy: Any) -> Callable[..., Any]:
        """Return the policy's update with the adapter's namespace."""
        return lambda state, flag: policy.update(state, flag, xp=self.adapter.xp)

    def run(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` converted to this way of running."""
        return self.way.transform(function)

    def expect(self, what: str, actual: Any, values: Any, dtype: str, rtol: float = 0.0) -> None:
        """Require an array of this dtype and these values, equal bit for bit or within `rtol`."""
        found = self.adapter.dtype_of(actual)
        require(found == dtype, f"{what} is {found}, but must be {dtype}")
        values = np.asarray(values)
        if not self.way.has_values:
            shape = getattr(actual, "shape", values.shape)
            require(tuple(shape) == values.shape, f"{what} has shape {tuple(shape)}, but must have {values.shape}")
            return
        numbers = np.asarray(self.adapter.to_numpy(actual))
        shape = np.asarray(self.adapter.to_numpy(self.array(values, dtype))).shape
        require(numbers.shape == shape, f"{what} has shape {numbers.shape}, but must have {shape}")
        numbers, values = numbers.astype(_WIDEST[values.dtype.kind]).ravel(), values.ravel()
        wrong = np.flatnonzero(~_agree(numbers, values, rtol))
        if len(wrong):
            first = wrong[0]
            require(False, f"{what} is {numbers[first]} at position {first}, but must be {values[first]}")

    def expect_flag(self, what: str, actual: Any, value: bool) -> None:
        """Require a bool of shape `()` with this value."""
        self.expect(what, actual, np.asarray(value), "bool")

    def expect_state(self, what: str, actual: Any, expected: Any) -> None:
        """Require that the fields of a state equal those of a host state bit for bit."""
        require(actual._fields == expected._fields, f"{what} has fields {actual._fields}, not {expected._fields}")
        for name, value, right in zip(expected._fields, actual, expected, strict=True):
            self.expect(f"{name} {what}", value, right, right.dtype.name)


def require(holds: bool, otherwise: str) -> None:
    """Raise `AssertionError` with the message `otherwise` unless the rule holds."""
    if not holds:
        raise AssertionError(otherwise)


def require_structure(what: str, actual: Any, expected: Any) -> None:
    """Require the same containers and keys, and None in the same places."""
    try:
        tree.map_leaves(lambda *_: None, *(tree.map_leaves(_presence, each) for each in (expected, actual)))
    except ValueError as error:
        raise AssertionError(f"{what} lost its structure: {error}") from None


def _presence(leaf: Any) -> Any:
    return None if leaf is None else True


def _agree(numbers: Any, values: Any, rtol: float) -> Any:
    """Return where two arrays are equal; NaN equals NaN, and zeros must have the same sign."""
    if rtol:
        return np.isclose(numbers, values, rtol=rtol, atol=0.0)
    if values.dtype.kind == "c":
        return _agree(numbers.real, values.real, rtol) & _agree(numbers.imag, values.imag, rtol)
    if values.dtype.kind != "f":
        return numbers == values
    # -0.0 == 0.0, but its reciprocal has another sign: bit for bit they differ.
    same = (numbers == values) & (np.signbit(numbers) == np.signbit(values))
    return same | (np.isnan(numbers) & np.isnan(values))
