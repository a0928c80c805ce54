"""Optimizers that are not torch's, as packages have them."""

import torch

from tests.adapters.torch_ranks import local


class Duck:
    """No more than the two names that a scaler needs, and room for nothing else."""

    __slots__ = ("param_groups",)

    def __init__(self, params, lr=1.0):
        self.param_groups = [{"params": list(params)}]

    def step(self):
        for param in self.param_groups[0]["params"]:
            param.data -= param.grad


class FusedDuck(torch.optim.SGD):
    """SGD with a kernel of its own: it takes the factor and the flag, and parameters of several meshes."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, lr=lr)
        self._step_supports_amp_scaling = True

    def step(self, closure=None):
        """Subtract the gradients if the flag is 0.0."""
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                grad = local(param.grad)
                grad = grad if self.grad_scale is None else grad / self.grad_scale
                local(param).sub_(torch.where(self.found_inf == 0.0, grad, 0.0))


class Container(torch.optim.Optimizer):
    """An optimizer that holds several and steps each, as torchtitan's does."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        super().__init__([param for each in optimizers for group in each.param_groups for param in group["params"]], {})

    def step(self, *args, **kwargs):
        """Step each."""
        for each in self.optimizers:
            each.step(*args, **kwargs)


class Delegating:
    """A wrapper that has no name of its own."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)
