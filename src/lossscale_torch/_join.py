"""Uneven inputs: the part of a scaler in `torch.distributed.algorithms.join.Join`, beside its model's."""

from typing import Any

import torch
from torch import Tensor

from lossscale_core.errors import CallOrderError


class JoinedScaler:
    """The join hook of a scaler, and the messages between ranks with inputs and ranks that have run out of them.

    Each flag that is combined over the process group goes out together with a 1, and a step ends with a 0. A rank
    without inputs answers with zeros until the step ends, and so needs to know nothing of optimizers. The protocol is
    that of https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html.
    """

    def __init__(self, scaler: Any, ranks: Any) -> None:
        self._scaler = scaler
        self._ranks = ranks
        self._group = scaler.join_process_group
        self._device = scaler.join_device
        self.is_combining = scaler.is_enabled() and ranks.process_group is not None
        """Whether flags are combined over the group; else its ranks have nothing to say to each other in a step."""

    def is_enabled(self) -> bool:
        """Return whether ranks may run out of inputs; raise `CallOrderError` where nothing tells them of a step."""
        if self._scaler._join_config.enable and self._scaler._join_config.is_first_joinable:
            raise CallOrderError(
                "the scaler comes first in Join, but a step begins with the forward pass of the model; "
                "write Join([model, scaler]), where model is a DistributedDataParallel"
            )
        return bool(self._scaler._join_config.enable)

    def reduce_max(self, flag: Tensor) -> None:
        """Combine a flag over the ranks with inputs, in place."""
        message = torch.stack([flag, torch.ones_like(flag)])
        self._exchange(message)
        flag.copy_(message[0])

    def end_step(self) -> None:
        """Tell ranks without inputs that no more flags come in this step."""
        if self.is_combining:
            self._exchange(torch.zeros(2, device=self._device))

    def main_hook(self) -> None:
        """Take part in one step of the ranks with inputs; called on a rank without them."""
        is_going_on = self.is_combining
        while is_going_on:
            message = torch.zeros(2, device=self._device)
            self._exchange(message)
            is_going_on = bool(message[1] != 0.0)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Go on from the state of a rank that had inputs to the end; called on every rank."""
        # A rank that ran out of inputs has missed the updates since, and only the last joiners have counted all.
        everyone: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(everyone, (is_last_joiner, self._scaler.state_dict()), group=self._group)
        if not is_last_joiner:
            self._scaler.load_state_dict(next(state for is_last, state in everyone if is_last))
        self._ranks.joined = None

    def _exchange(self, message: Tensor) -> None:
        torch.distributed.all_reduce(message, op=torch.distributed.ReduceOp.MAX, group=self._group)
