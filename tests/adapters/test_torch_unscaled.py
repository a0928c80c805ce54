"""Gradients that do not follow the loss scale: `range_report` names them in wrong models, and none in right ones."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lossscale_core.adapters import RangeReport
from lossscale_torch import GradScaler, range_report


class MoE(nn.Module):
    """Two experts and a router; `attach` adds the router's loss."""

    def __init__(self, attach):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.attach = attach

    def forward(self, x):
        shares = self.router(x).float().softmax(-1)
        out = sum(shares[..., n, None].to(x.dtype) * expert(x) for n, expert in enumerate(self.experts))
        return self.attach(out, 0.1 * shares.square().mean())


class AddedByHand(torch.autograd.Function):
    """Megatron's way, without a call that sets the scale."""

    @staticmethod
    def forward(ctx, x, aux_loss):
        ctx.save_for_backward(aux_loss)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones_like(ctx.saved_tensors[0])


class AddingToWeights(torch.autograd.Function):
    """A linear layer that adds weight decay in its backward pass."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x + 0.01 * weight


class Function(nn.Module):
    """A function as a module, so that it has a place in a `Sequential`."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def _mlp(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), *layers, nn.Linear(8, 8))


def _squares(model, x=None):
    """Return the loss under float16 autocast, as a function."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)) if x is None else x

    def loss():
        with torch.autocast("cpu", torch.float16):
            return model(x).float().square().mean()

    return loss


# Right models: a pair of the model and the function of its loss.


def _dropout():
    model = _mlp(nn.Dropout(0.5))
    return model, _squares(model)


def _batch_norm():
    model = _mlp(nn.BatchNorm1d(8))
    return model, _squares(model)


def _shared_weights():
    layer = nn.Linear(8, 8)
    model = _mlp(layer, nn.ReLU(), layer)
    return model, _squares(model)


def _sparse_embedding(sparse=True):
    model = nn.Sequential(nn.Embedding(20, 8, sparse=sparse), nn.Linear(8, 8))
    return model, _squares(model, torch.tensor([1, 1, 3, 7]))


def _mixture():
    model = _mlp(MoE(GradScaler("cpu").attach), MoE(GradScaler("cpu", enabled=False).attach))
    return model, _squares(model)


def _gradient_clipping():
    """Let the optimizer clip after unscaling, by a hook on the step; the backward pass is not concerned."""
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    return model, _squares(model)


def _tiny_gradients():
    """Return gradients that mostly flush to zero at any scale that fits, and more at half of it."""
    model = _mlp(Function(lambda x: x * torch.logspace(-8, 4, 8, dtype=torch.float16)))
    return model, _squares(model)


def _whole_model_in_float16():
    model = _mlp().half()
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).half()
    return model, lambda: (model(x).float() * 1e-3).square().mean()


def _several_terms():
    model = _mlp(MoE(lambda x, aux: x))

    def loss():
        main = _squares(model)()
        return main + 1e-3 * sum(param.square().sum() for param in model.parameters()) + 0.1 * main.sqrt()

    return model, loss


def _frozen_weights():
    model = _mlp(MoE(GradScaler("cpu").attach))
    model[0].requires_grad_(False)
    model[2].router.requires_grad_(False)
    return model, _squares(model)


def _checkpointed(use_reentrant):
    inner = _mlp(MoE(GradScaler("cpu").attach), nn.Dropout(0.5), nn.BatchNorm1d(8))
    model = nn.Sequential(nn.Linear(8, 8), Function(functools.partial(checkpoint, inner, use_reentrant=use_reentrant)))
    model.inner = inner
    return model, _squares(nn.Sequential(*list(model.children())[:2]))


def _loop():
    model = nn.LSTM(8, 8, batch_first=True)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    return model, lambda: model(x)[0].square().mean()


def _penalty():
    model = _mlp()
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def loss():
        main = model(x).square().mean()
        (grad,) = torch.autograd.grad(main, x, create_graph=True)
        return main + grad.square().sum()

    return model, loss


def _masked():
    """Attention with masked places, and an infinite weight that a mask leaves out."""
    model = _mlp(Function(lambda x: (x @ x.T).masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf).softmax(-1)))
    model[-1] = nn.Linear(16, 8)
    return model, _squares(model)


def _not_finite_at_any_scale():
    """Return a square root of zero: its gradient is NaN at every scale, also at zero."""
    model = _mlp()
    model.extra = nn.Parameter(torch.zeros(3))
    parts = nn.Sequential(*list(model)[:3])
    return model, lambda: _squares(parts)() + model.extra.abs().sqrt().sum() * 0.0 + model.extra.sum()


def _scaled_hook():
    """Return a hook that is linear: it weights the gradients of a layer."""
    model = _mlp()
    model[0].weight.register_hook(lambda grad: 0.5 * grad)
    return model, _squares(model)


def _bfloat16():
    model = _mlp(MoE(GradScaler("cpu").attach)).bfloat16()
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    return model, lambda: model(x).float().square().mean()


def _unused():
    model = _mlp()
    model.unused, model.empty = nn.Linear(8, 8), nn.Parameter(torch.ones(0))
    parts = nn.Sequential(*list(model)[:3])
    return model, lambda: _squares(parts)() + model.empty.sum()


RIGHT = {
    "plain": lambda: (model := _mlp(), _squares(model)),
    "float32": lambda: (model := _mlp(), lambda: model(torch.ones(3, 8)).square().mean()),
    "dropout": _dropout,
    "BatchNorm": _batch_norm,
    "shared weights": _shared_weights,
    "embedding": lambda: _sparse_embedding(sparse=False),
    "sparse embedding": _sparse_embedding,
    "mixture of experts": _mixture,
    "clipping in the optimizer": _gradient_clipping,
    "tiny gradients": _tiny_gradients,
    "float16": _whole_model_in_float16,
    "bfloat16": _bfloat16,
    "several terms": _several_terms,
    "frozen weights": _frozen_weights,
    "checkpoint": lambda: _checkpointed(use_reentrant=False),
    "reentrant checkpoint": lambda: _checkpointed(use_reentrant=True),
    "loop": _loop,
    "penalty": _penalty,
    "masks": _masked,
    "NaN": _not_finite_at_any_scale,
    "weighting hook": _scaled_hook,
    "unused": _unused,
}

# Wrong models: the same, and the names and causes.


def _router_by_hand():
    model = _mlp(MoE(AddedByHand.apply))
    return model, _squares(model), [("0.weight", "inside"), ("0.bias", "inside"), *_OF_ROUTER]


_OF_ROUTER = [("2.router.weight", "inside"), ("2.router.bias", "inside")]


def _own_scaler():
    """Set the seed once, as a class attribute; it is not that of the pass."""
    model = _mlp(MoE(lambda x, aux: AddedByHand.apply(x, 2.0**16 * aux)))
    return model, _squares(model), [("0.weight", "inside"), ("0.bias", "inside"), *_OF_ROUTER]


def _hooked(hook, cause):
    model = _mlp()
    model[0].weight.register_hook(hook)
    return model, _squares(model), [("0.weight", cause)]


def _decay_in_backward():
    model = _mlp()
    weight = nn.Parameter(0.1 * torch.ones(8, 8))
    model.weight = weight
    x = torch.ones(2, 8)
    parts = nn.Sequential(*list(model)[:3])
    return model, lambda: AddingToWeights.apply(parts(x), weight).square().mean(), [("weight", "inside")]


def _calls_backward():
    """Run the backward pass of another loss, as of the prediction of a second token."""
    model = _mlp()
    head = model.head = nn.Linear(8, 1)
    parts = nn.Sequential(*list(model)[:3])

    def loss():
        head(torch.ones(2, 8)).mean().backward()
        return _squares(parts)() + 0.0 * head.weight.sum()

    return model, loss, [("head.weight", "early"), ("head.bias", "early")]


def _decay_by_a_hook():
    model = _mlp()
    weight = model[0].weight
    weight.register_hook(lambda grad: grad + 0.01 * weight.detach())
    return model, _squares(model), [("0.weight", "inside")]


WRONG = {
    "router loss by a custom backward": _router_by_hand,
    "router loss at a scale set by hand": _own_scaler,
    "weight decay in a custom backward": _decay_in_backward,
    "hook that adds": lambda: _hooked(lambda grad: grad + 1e-6, "inside"),
    "hook that adds weight decay": _decay_by_a_hook,
    "hook that clamps": lambda: _hooked(lambda grad: grad.clamp(-1e-3, 1e-3), "nonlinear"),
    "hook that normalises": lambda: _hooked(lambda grad: grad / (grad.norm() + 1e-6), "nonlinear"),
    "hook that divides by zero": lambda: _hooked(lambda grad: grad / grad.norm(), "nonlinear"),
    "hook that takes signs": lambda: _hooked(torch.sign, "nonlinear"),
    "loss_fn that calls backward": _calls_backward,
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_models_are_not_named(name):
    """No gradient is named, and what the report changes is put back."""
    model, loss_fn = RIGHT[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = range_report(model, loss_fn)
    assert report.unscaled_gradients == ()
    assert "loss scale, first" not in str(report).replace("overflows above a loss scale", "")
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("name", WRONG)
def test_wrong_models_are_named(name):
    """Each parameter with a gradient that does not follow the scale is named with the cause, and no other."""
    model, loss_fn, expected = WRONG[name]()
    report = range_report(model, loss_fn)
    assert [*report.unscaled_gradients] == expected
    assert f"not follow the loss scale, first {expected[0][0]}" in str(report)
    assert RangeReport.from_dict(report.to_dict()) == report


def test_a_weight_far_below_the_loss_is_named():
    """No tolerance: a router loss of weight 1e-30 is named in float32."""
    model = _mlp(MoE(lambda x, aux: AddedByHand.apply(x, 1e-30 * aux)))
    names = [each.name for each in range_report(model, lambda: model(torch.ones(3, 8)).mean()).unscaled_gradients]
    assert "2.router.weight" in names


def test_attach_uses_the_seed_of_the_pass():
    """The loss that `attach` adds does not depend on the scaler, and a report does not place its scale."""
    scaler = GradScaler("cpu", init_scale=4.0)
    model = _mlp(MoE(scaler.attach))
    assert range_report(model, _squares(model)).unscaled_gradients == ()
    assert scaler._scale is None
    assert scaler.get_scale() == 4.0
    unwrapped = torch.compile(model, backend="eager")
    assert range_report(unwrapped, _squares(unwrapped)).unscaled_gradients == ()


def test_an_attached_loss_that_overflows_limits_the_scale():
    """The report measures float16 gradients of attached losses like others."""
    model = nn.Linear(8, 8)
    scaler = GradScaler("cpu")

    def loss_fn():
        large = 4 * (16 * model.weight).half()
        return scaler.attach(model(torch.ones(2, 8)), large).mean()

    report = range_report(model, loss_fn)
    assert report.overflows_above == 2.0**13
    assert report.unscaled_gradients == ()


def test_a_freed_graph_is_explained():
    """`loss_fn` that calls backward on what it returns: torch's error says what to do."""
    model = _mlp()

    def loss_fn():
        loss = _squares(model)()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="second time") as raised:
        range_report(model, loss_fn)
    assert raised.value.__notes__ == ["loss_fn calls backward itself; return the loss, and leave that to range_report."]


def test_existing_gradients_are_not_early():
    """Gradients from before the report stay, and are not blamed on `loss_fn`."""
    model = _mlp()
    _squares(model)().backward()
    before = [param.grad.clone() for param in model.parameters()]
    assert range_report(model, _squares(model)).unscaled_gradients == ()
    assert all(torch.equal(param.grad, each) for param, each in zip(model.parameters(), before, strict=True))
