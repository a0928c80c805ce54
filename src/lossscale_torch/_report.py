"""`overflow_report`: the parameters with gradients that are not finite."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lossscale_core.adapters import OverflowReport
from lossscale_torch._gradients import at_least_float32, values_of
from lossscale_torch._record import read_numbers
from lossscale_torch._verbs import all_finite


def overflow_report(
    named_parameters: Iterable[tuple[str, Tensor]], *, loss: Tensor | float | None = None
) -> OverflowReport:
    """Report the parameters with a gradient that holds NaN or infinity, where the fault began, and its cause.

    Call it after a skipped step. The report is empty if all gradients are finite. Synchronises with the host.

    Args:
        named_parameters: Pairs of a name and a parameter, such as `model.named_parameters()`. The report keeps their
            order.
        loss: The unscaled loss of the step. With it the report can name the cause; the gradients do not suffice, since
            an overflow of the backward pass may leave NaN without an infinity.

    Returns:
        A list of `GradientReport`. Its `verdict` says whether a smaller loss scale helps.

    Raises:
        TypeError: `named_parameters` does not consist of pairs of a name and a parameter.
    """
    names, bad = bad_gradients(pairs(named_parameters, "overflow_report"))
    arrays = [(name, at_least_float32(values).cpu().numpy()) for name, values in bad]
    is_loss_finite = None if loss is None else bool(all_finite(loss))
    return OverflowReport(arrays, loss_finite=is_loss_finite, checked=len(names), in_order=names)


def bad_gradients(named: Iterable[tuple[str, Any]]) -> tuple[list[str], list[tuple[str, Tensor]]]:
    """Return the names of all gradients, and the names and values of nonfinite gradients. Waits for devices once."""
    gradients = [(name, values_of(param.grad.detach())) for name, param in named if param.grad is not None]
    flags = [torch.isfinite(values).all() for _, values in gradients]
    are_finite = read_numbers(flags, flags[0].device) if flags else []
    bad = [pair for pair, is_finite in zip(gradients, are_finite, strict=True) if not is_finite]
    return [name for name, _ in gradients], bad


def pairs(named_parameters: object, caller: str) -> list[tuple[str, Tensor]]:
    """Return the pairs of a name and a parameter as a list; raise `TypeError` for other values."""
    is_single = isinstance(named_parameters, Module) or not isinstance(named_parameters, Iterable)
    listed: list[Any] = [named_parameters] if is_single else [*named_parameters]  # type: ignore[misc]  # is iterable
    for pair in listed:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            kind = type(pair).__name__ if is_single else f"an iterable of {type(pair).__name__}"
            raise TypeError(
                f"{caller} was given {kind}; it takes pairs of a name and a parameter; pass model.named_parameters()"
            )
    return listed
