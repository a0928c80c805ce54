"""Models whose forward pass overflows in float16 at every loss scale, each in another way, and all well in float32."""

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


class RMSNorm(nn.Module):
    """The root mean square is computed in the dtype of the input."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class T5FeedForward(nn.Module):
    """T5's feed-forward layer: the output of `wo` is large, and the residual stream has room for it in float32."""

    def __init__(self, width, gain):
        super().__init__()
        self.norm, self.wi, self.wo = RMSNorm(width), nn.Linear(width, 32, bias=False), nn.Linear(32, width, bias=False)
        nn.init.constant_(self.wo.weight, gain)

    def forward(self, x):
        return x + self.wo(self.wi(self.norm(x)).relu())


class Residual(nn.Module):
    """A block that adds to the residual stream; a stream of several blocks exceeds what float16 holds."""

    def __init__(self, width, gain):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.gain = gain

    def forward(self, x):
        return x + self.gain * (1.0 + self.linear(self.norm(x.float())).tanh())


class Experts(nn.Module):
    """Experts that are added in place to a buffer in the dtype of the input; the output of one overflows."""

    def __init__(self, width, gain):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        _scaled(self.experts[1], gain)

    def forward(self, x):
        x = x.flatten(0, 1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.arange(index, len(x), 2)
            out.index_add_(0, rows, expert(x[rows]))
        return out.unflatten(0, (8, -1))


def _scaled(module, gain):
    """Multiply the weights of a module."""
    with torch.no_grad():
        module.weight.mul_(gain)
    return module


def _sequential(*layers):
    """Return a model from a linear layer, whose output autocast makes float16, to a head behind a norm."""
    return nn.Sequential(nn.Linear(16, 16), *layers, nn.LayerNorm(16), nn.Linear(16, 4))


MODELS = {
    "exp without a maximum": lambda: _sequential(Attention(16, 60.0)),
    "squares of RMSNorm": lambda: nn.Sequential(_scaled(nn.Linear(16, 16), 1e3), RMSNorm(16), nn.Linear(16, 4)),
    "T5's wo": lambda: _sequential(T5FeedForward(16, 1.0), T5FeedForward(16, 3e4)),
    "residual stream": lambda: _sequential(*(Residual(16, 2e4) for _ in range(5))),
    "experts in place": lambda: _sequential(Experts(16, 2e5)),
}


def made(name):
    """Return a model and its loss, a function of whether autocast computes it in float16."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()  # without dropout, so that runs can be compared
    x = torch.randn(8, 6, 16)

    def loss_of(in_float16=True):
        with torch.autocast("cpu", torch.float16, enabled=in_float16):
            out = model(x)
        return (out.float() - x[..., :4].tanh()).square().mean()

    return model, loss_of
