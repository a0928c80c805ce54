"""A report on the non-finite gradients of a step."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lossscale_core._messages import join_names

BACKWARD_CAUSES = "a division by zero, or a root or a logarithm at zero, in the backward pass"
"""The causes of NaN gradients of a finite loss at every loss scale: https://github.com/jax-ml/jax/issues/26328."""
BAD_LOSS = (
    "the loss itself is NaN or infinite: no loss scale fixes this; look at the inputs and the learning rate, and at "
    "logarithms, roots and divisions in the forward pass"
)
"""The message for a non-finite loss; a watch logs it as the event `bad_loss`."""
UNCLEARED = "gradients that were not cleared after a skipped step"
"""The commonest cause of overflows at every loss scale: new gradients are added to the gradients of a skipped step."""
_MANY = 5
"""The smallest number of gradients, all of them non-finite, that one line describes together."""


class GradientReport(NamedTuple):
    """The counts of non-finite elements in one gradient."""

    name: str
    """The name of the parameter."""
    nan: int
    """The number of NaN elements."""
    positive_inf: int
    """The number of +inf elements."""
    negative_inf: int
    """The number of -inf elements."""
    largest_finite: float
    """The largest magnitude among the finite elements, as stored; 0.0 if no element is finite."""


class OverflowReport(list[GradientReport]):
    """The reports on the non-finite gradients, and the cause that the loss indicates.

    Args:
        gradients: The name and the array of each non-finite gradient. `np.asarray` must accept the array, and its
            elements are floats or complex numbers.
        loss_finite: Whether the unscaled loss is finite; None if the loss is unknown.
        checked: The number of checked gradients. If none of five or more is finite, the text has one line for all.
        in_order: The names of all checked gradients in the order of the forward pass, if the order is known. The text
            then also says where the fault is.
    """

    def __init__(
        self,
        gradients: Iterable[tuple[str, Any]] = (),
        *,
        loss_finite: bool | None = None,
        checked: int | None = None,
        in_order: Sequence[str] = (),
    ) -> None:
        super().__init__(_count(name, values) for name, values in gradients)
        self.loss_finite, self.checked, self.in_order = loss_finite, checked, tuple(in_order)

    @property
    def verdict(self) -> str:
        """A recommendation in one or two clauses. It needs the loss, because the gradients do not show the cause."""
        if self.loss_finite is False:
            return BAD_LOSS
        if not self:
            return "every gradient is finite"
        if self.loss_finite is None:
            return "pass loss= to learn whether the scale or the loss is the cause"
        if any(report.positive_inf or report.negative_inf for report in self):
            return f"finite loss: a smaller loss scale usually fixes this, but not {UNCLEARED}"
        causes = f"{BACKWARD_CAUSES}, or from {UNCLEARED}"
        return f"finite loss, NaN without an infinity: a smaller loss scale fixes this unless it comes from {causes}"

    def __str__(self) -> str:
        reports: list[GradientReport] = self
        if len(self) == self.checked and len(self) >= _MANY:
            _, nan, positive, negative, largest = zip(*self, strict=True)
            counts = sum(nan), sum(positive), sum(negative)
            reports = [GradientReport(f"all {len(self)} parameters", *counts, max(largest))]
        lines = [
            f"{report.name}: {report.nan} NaN, {report.positive_inf} +inf, {report.negative_inf} -inf, "
            f"largest finite {report.largest_finite:g}"
            for report in reports
        ]
        if self and self.in_order and self.loss_finite is not False:
            lines.append(locate_fault([report.name for report in self], self.in_order))
        return "\n".join([*lines, self.verdict])


def locate_fault(bad: Sequence[str], in_order: Sequence[str] = ()) -> str:
    """Return a clause that says which gradients are not finite, and where the fault is.

    Gradients flow from the loss to the first layer, and NaN and infinity flow with them. The fault is therefore at the
    layer of the last non-finite gradient, or between this layer and the loss.

    Args:
        bad: The names of the non-finite gradients.
        in_order: The names of all checked gradients in the order of the forward pass. Without the order, the clause
            lists the names.

    Returns:
        The clause.
    """
    if len(in_order) < 2 or not {*bad} <= {*in_order}:
        return f"the gradients of {join_names(bad)} are not finite"
    if len(bad) == len(in_order):
        return f"none of the {len(bad)} gradients is finite: look at the loss or the last layer"
    last = max(map(in_order.index, bad))
    after = f", and the gradient of {in_order[last + 1]} is" if last + 1 < len(in_order) else ""
    count = f" ({len(bad)} of {len(in_order)} are not)" if len(bad) > 1 else ""
    return f"the gradient of {in_order[last]} is not finite{after}{count}"


def _count(name: str, gradient: Any) -> GradientReport:
    values = np.asarray(gradient)
    parts = np.stack([values.real, values.imag]) if np.iscomplexobj(values) else values
    nan, positive, negative = (int(test(parts).sum()) for test in (np.isnan, np.isposinf, np.isneginf))
    largest = np.abs(parts, where=np.isfinite(parts), out=np.zeros_like(parts)).max(initial=0.0)
    return GradientReport(name, nan, positive, negative, float(largest))
