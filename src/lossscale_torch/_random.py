"""The states of torch's random number generators, which a second run of a loss starts from."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from lossscale_torch._versions import current_accelerator


class RandomState:
    """A snapshot of torch's generators, on the host and on every device of the accelerator."""

    def __init__(self) -> None:
        self._host = torch.get_rng_state()
        self._devices = [(set_state, get_state()) for get_state, set_state in _device_generators()]

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self._host)
        for set_state, state in self._devices:
            set_state(state)


def _device_generators() -> list[tuple[Callable[[], Tensor], Callable[[Tensor], None]]]:
    """Return a getter and a setter for the generator of each device, without initialising the accelerator."""
    accelerator = current_accelerator()
    if accelerator is None:
        return []
    module = torch.get_device_module(accelerator)
    if hasattr(module, "is_initialized") and not module.is_initialized():
        return []
    if accelerator.type == "mps":  # its functions take no index
        return [(module.get_rng_state, module.set_rng_state)]
    return [
        (functools.partial(module.get_rng_state, index), functools.partial(module.set_rng_state, device=index))
        for index in range(torch.accelerator.device_count())
    ]
