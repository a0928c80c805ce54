"""`attach`: a loss that a layer computes inside the model; the backward pass multiplies its gradients by the scale."""

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lossscale_core.adapters import warn_caller
from lossscale_torch._gradients import at_least_float32, is_dtensor

if TYPE_CHECKING:
    from lossscale_torch._scaler import GradScaler

ATTACHED_SCALE: ContextVar[Tensor | None] = ContextVar("lossscale_torch_attach", default=None)
"""A loss scale that `attach` uses instead of the scaler's own, for every scaler: float32, shape `()`."""


class Attach:
    """The function `GradScaler.attach` of a scaler. The copy of a layer that has this function shares the scaler."""

    def __init__(self, scaler: "GradScaler") -> None:
        self.scaler = scaler

    def __call__(self, x: Tensor, aux_loss: Tensor) -> Tensor:
        """Return `x`; the backward pass adds the gradients of the sum of `aux_loss`, times the loss scale."""
        _require_floats(x, "x")
        _require_floats(aux_loss, "aux_loss")
        scaler = self.scaler
        loss = at_least_float32(aux_loss.full_tensor() if is_dtensor(aux_loss) else aux_loss).sum()  # type: ignore[attr-defined]
        is_compiling = torch.compiler.is_compiling()
        scale = None if is_compiling else ATTACHED_SCALE.get()
        if scale is not None or not scaler._enabled:
            return _Attach.apply(x, loss, torch.ones((), device=loss.device) if scale is None else scale, None)
        state = scaler._state  # Dynamo cannot compile `scaler._scale`, which is a property
        if state._scale is None:
            scaler._lazy_init_scale_growth_tracker(loss.device)
        return _Attach.apply(x, loss, state._scale, None if is_compiling else scaler)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Attach":
        return Attach(memo.get(id(self.scaler), self.scaler))


class _Attach(torch.autograd.Function):
    """The identity of `x`. The backward pass reads the scale, from the tensor that the scaler writes in place."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, loss: Tensor, scale: Tensor, scaler: "GradScaler | None") -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        # `save_for_backward` would make autograd refuse the scale after an update.
        _, loss, ctx.scale, ctx.scaler = inputs
        ctx.kind = loss.device, loss.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        scaler: GradScaler | None = ctx.scaler
        if scaler is not None and not (scaler._losses or scaler._loss_is_optional):  # as in a loaded model
            scaler._loss_is_optional = True
            warn_caller(
                "an attached loss takes its loss scale from a scaler that has scaled no loss since its last "
                "update(), so that its gradients may have another scale than the gradients of the main loss; pass the "
                "main loss through scale() of the same scaler; after loading a model or making a new scaler, set "
                "attach=scaler.attach again"
            )
        device, dtype = ctx.kind
        return grad, ctx.scale.to(device, dtype, copy=True), None, None


def _require_floats(value: object, name: str) -> None:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        kind = f"a {value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"{name} is {kind}, which cannot have gradients; attach takes tensors of floats; pass an activation and a "
            "loss that the model computes: x = scaler.attach(x, aux_loss)"
        )
