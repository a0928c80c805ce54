"""Optimizers that are not torch's, as packages have them."""

import torch


class Duck:
    """No more than the two names that a scaler needs, and room for nothing else."""

    __slots__ = ("param_groups",)

    def __init__(self, params):
        self.param_groups = [{"params": list(params)}]

    def step(self):
        for param in self.param_groups[0]["params"]:
            param.data -= param.grad


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
