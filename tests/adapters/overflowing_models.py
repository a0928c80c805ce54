"""Layers with a forward pass that overflows in float16 at every loss scale if their gain is large."""

import torch
from torch import nn


class Attention(nn.Module):
    """One head of attention; its softmax is written out and subtracts no maximum."""

    def __init__(self, width, gain):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.gain = gain

    def forward(self, x):
        scores = self.gain * self.query(x) @ self.key(x).transpose(-1, -2) / x.shape[-1] ** 0.5
        weights = scores.exp()
        return self.out(weights / weights.sum(-1, keepdim=True) @ self.value(x))


class Experts(nn.Module):
    """Experts that are added in place to a buffer in the dtype of the input; the output of one overflows."""

    def __init__(self, width, gain):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.experts[1].weight.data.mul_(gain)

    def forward(self, x):
        x = x.flatten(0, 1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.arange(index, len(x), 2)
            out.index_add_(0, rows, expert(x[rows]))
        return out.unflatten(0, (8, -1))
