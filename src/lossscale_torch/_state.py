"""Places a scaler's state: on the host while flags arrive there, on a device while they do not."""

from typing import Any

import torch

from lossscale_core import ScalingPolicy, StepInfo, as_policy, step_info


def init_state(policy: Any, *, device: torch.device | str | None = None) -> Any:
    """Return the state before the first step under `policy`: tensors of shape `()` on `device`.

    `policy` is anything `as_policy` takes. Does not synchronise.
    """
    return _on_device(as_policy(policy).init_state(), device)


def _on_device(host_state: Any, device: torch.device | str | None) -> Any:
    return host_state._make(torch.tensor(value, device=device) for value in host_state)


class ScalerState:
    """A policy, its state, and where that lives.

    Flags known on the host update the state there, in microseconds; the first flag that only a device knows moves it to
    that device, where it stays until somebody reads it. Updates that follow one another without `begin_step` count as
    one step whose flag is theirs combined, so that a scale backs off once however many optimizers overflowed.
    """

    def __init__(self, policy: ScalingPolicy, state: Any = None) -> None:
        self.policy = policy
        self.current = policy.init_state() if state is None else state
        """The state: host scalars, or tensors of shape `()`."""
        self.is_on_host = True
        """Whether reading the state costs no synchronisation."""
        self._before: Any = None
        self._finite: Any = None

    def begin_step(self) -> None:
        """Say that the next update belongs to another step than the last."""
        self._before = self._finite = None

    def update(self, grads_finite: Any) -> StepInfo:
        """Update by a Python bool, or by a bool tensor of shape `()`; return what happened. Does not synchronise."""
        if self._before is None and self.is_on_host and not isinstance(grads_finite, torch.Tensor):
            self._before, self._finite = self.current, grads_finite
            self.current = self.policy.update(self._before, grads_finite)
            return step_info(self._before, self.current)
        before = self.current if self._before is None else self._before
        finite = grads_finite if self._finite is None else self._finite & grads_finite
        if isinstance(before.loss_scale, torch.Tensor):
            finite = torch.as_tensor(finite, device=before.loss_scale.device)
        elif isinstance(finite, torch.Tensor):
            before = _on_device(before, finite.device)
        self.is_on_host = not isinstance(finite, torch.Tensor)
        self.current = self.policy.update(before, finite, xp=None if self.is_on_host else torch)
        self._before, self._finite = before, finite
        return step_info(before, self.current)

    def read(self) -> Any:
        """Return the state as host scalars. Waits for the device where it lives on one, and keeps it on the host."""
        if not self.is_on_host:
            self.current = self._on_host(self.current)
            self.is_on_host = True
            if self._before is not None:
                self._before, self._finite = self._on_host(self._before), bool(self._finite)
        return self.current

    def _on_host(self, state: Any) -> Any:
        start = self.policy.init_state()
        return start._make(type(first)(value.item()) for first, value in zip(start, state, strict=True))

    def set(self, **fields: Any) -> None:
        """Set fields of the state to plain numbers."""
        state = self.read()
        self.current = state._replace(**{name: type(getattr(state, name))(value) for name, value in fields.items()})
        self.begin_step()

    def may_be_below_one(self) -> bool:
        """Return whether the loss scale may be below 1, where unscaling can overflow. Waits for no device."""
        scale = self.current.loss_scale
        if self.is_on_host:
            return bool(scale < 1.0)
        if scale.device.type == "cpu":
            return bool(scale.numpy() < 1.0)  # in the host's own memory there is nobody to wait for
        return getattr(self.policy, "min_scale", 0.0) < 1.0
