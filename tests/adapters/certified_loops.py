"""Ten training loops in the style of public trainers, as `build` objects for `lossscale certify`.

Each skips right. `test_torch_certify_score.py` replaces single lines of this file, one fault at a time.
"""

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def _data(batch, place=0, rows=8, columns=4):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(100 * batch + place))


class _Loop:
    """What all have: save and load of `parts`, which are objects with `state_dict`."""

    parts = ("model", "optimizer", "scaler")

    def state_dict(self):
        return {name: getattr(self, name).state_dict() for name in self.parts}

    def load_state_dict(self, saved):
        for name in self.parts:
            getattr(self, name).load_state_dict(saved[name])


class NanoGPT(_Loop):
    """Micro-batches, a learning rate by the number of the iteration, clipping, as nanoGPT's train.py."""

    def __init__(self, scaler):
        self.scaler, self.iter_num = scaler, 0
        self.model = nn.Sequential(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, betas=(0.9, 0.95))

    def step(self, batch):
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + self.iter_num)
        for micro_step in range(2):
            tokens = _data(batch, micro_step).mul(9).long() % 16
            logits = self.model(tokens)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) / 2
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        info = self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.iter_num += bool(info.applied)

    def state_dict(self):
        return {**super().state_dict(), "iter_num": self.iter_num}

    def load_state_dict(self, saved):
        super().load_state_dict(saved)
        self.iter_num = saved["iter_num"]


class MinGPTDDP(_Loop):
    """A trainer with a snapshot and a schedule, over DistributedDataParallel where there is a group."""

    parts = ("model", "optimizer", "scheduler", "scaler")

    def __init__(self, scaler):
        self.scaler, self.model = scaler, nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
        self.parallel = self.model
        if torch.distributed.is_initialized():
            self.parallel = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1.0 / (1 + step))

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = (self.parallel(_data(batch)) - 1).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.follow(self.scaler.update())

    def follow(self, info):
        if info.applied:
            self.scheduler.step()


class Timm(_Loop):
    """A scaler that is called with the loss, an average of the weights, BatchNorm, as timm's train.py."""

    parts = ("model", "optimizer", "scheduler", "ema", "scaler")

    def __init__(self, scaler):
        self.scaler = scaler
        self.model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        self.scheduler = StepLR(self.optimizer, 2, 0.5)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.protect = [self.model]

    def loss_scaler(self, loss, parameters):
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        self.scaler.step(self.optimizer)
        return self.scaler.update()

    def step(self, batch):
        output = self.model(_data(batch)[:, None])
        loss = nn.functional.cross_entropy(output, torch.arange(8) % 3, label_smoothing=0.1)
        info = self.loss_scaler(loss, self.model.parameters())
        self.optimizer.zero_grad()
        if info.applied:
            self.ema.update_parameters(self.model)
            self.scheduler.step()


class ActorStep(_Loop):
    """An actor's step of reinforcement learning: a clipped ratio, micro-batches, and no step without a finite norm."""

    def __init__(self, scaler):
        self.scaler, self.model = scaler, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, batch):
        self.optimizer.zero_grad()
        for place in range(3):
            states, actions = _data(batch, place), torch.arange(8) % 5
            log_probs = self.model(states).log_softmax(-1)
            ratio = (log_probs[range(8), actions] - (torch.tensor(0.2).log())).exp()
            advantage = _data(batch, place + 10)[:, 0]
            clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
            entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
            self.scaler.scale((clipped - 0.01 * entropy) / 3).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Detection(_Loop):
    """A dict of weighted losses, and a schedule that compares scales."""

    parts = ("model", "optimizer", "scheduler", "scaler")

    def __init__(self, scaler):
        self.scaler = scaler
        self.model = nn.ModuleDict({"body": nn.Linear(4, 8), "boxes": nn.Linear(8, 4), "classes": nn.Linear(8, 3)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = StepLR(self.optimizer, 1, 0.9)

    def losses(self, batch):
        features = self.model["body"](_data(batch)).relu()
        boxes = nn.functional.l1_loss(self.model["boxes"](features), torch.zeros(8, 4))
        return {
            "boxes": boxes,
            "classes": nn.functional.cross_entropy(self.model["classes"](features), torch.arange(8) % 3),
        }

    def step(self, batch):
        weights = {"boxes": 5.0, "classes": 1.0}
        losses = self.losses(batch)
        loss = sum(losses[name] * weights[name] for name in losses)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        before = self.scaler.get_scale()
        self.scaler.update()
        if self.scaler.get_scale() >= before:
            self.scheduler.step()


class GAN(_Loop):
    """Two networks with an optimizer each, and one update."""

    parts = ("model", "optimizer", "other", "scaler")

    def __init__(self, scaler):
        self.scaler = scaler
        self.model = nn.ModuleDict(
            {"generator": nn.Linear(4, 4), "critic": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))}
        )
        self.optimizer = torch.optim.Adam(self.model["generator"].parameters(), lr=1e-2)
        self.other = torch.optim.Adam(self.model["critic"].parameters(), lr=1e-2)

    def step(self, batch):
        critic, softplus = self.model["critic"], nn.functional.softplus
        made = self.model["generator"](_data(batch))
        loss = softplus(critic(made.detach())).mean() + softplus(-critic(_data(batch, 1))).mean()
        self.other.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.other)
        loss = softplus(-critic(made)).mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class _Router(torch.autograd.Function):
    """A loss within the graph with a gradient that is not scaled."""

    @staticmethod
    def forward(ctx, x, aux_loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones(())


class MixtureOfExperts(_Loop):
    """A router with a loss of its own, added within the graph."""

    def __init__(self, scaler):
        self.scaler = scaler
        self.model = nn.ModuleDict({"router": nn.Linear(4, 2), "experts": nn.Linear(4, 2)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, batch):
        x = _data(batch)
        shares = self.model["router"](x).softmax(-1)
        balance = 0.01 * shares.mean(0).square().sum()
        mixed = self.scaler.attach(shares * self.model["experts"](x), balance).sum(-1)
        self.optimizer.zero_grad()
        self.scaler.scale((mixed - 1).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Speech(_Loop):
    """A recurrent network with gradients that are clipped by value."""

    parts = ("model", "optimizer", "scheduler", "scaler")

    def __init__(self, scaler):
        self.scaler, self.model = scaler, nn.GRU(4, 5)
        self.optimizer = torch.optim.Adadelta(self.model.parameters())
        self.scheduler = StepLR(self.optimizer, 1, 0.98)

    def step(self, batch):
        output, _ = self.model(_data(batch, rows=12).reshape(6, 2, 4))
        targets = torch.tensor([[1, 2], [3, 1]])
        loss = nn.functional.ctc_loss(output.log_softmax(-1), targets, torch.tensor([6, 6]), torch.tensor([2, 2]))
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_value_(self.model.parameters(), 0.01)
        self.scaler.step(self.optimizer)
        info = self.scaler.update()
        if info.applied:
            self.scheduler.step()


class Diffusion(_Loop):
    """Noise is predicted, and an average of the weights follows, from micro-batches in one call."""

    parts = ("model", "optimizer", "ema", "scaler")

    def __init__(self, scaler):
        self.scaler, self.model = scaler, nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.ema = AveragedModel(self.model)

    def losses(self, batch):
        for place in range(2):
            noise, time = torch.randn(8, 4), torch.rand(8, 1)
            noisy = time * _data(batch, place) + (1 - time) * noise
            yield (self.model(torch.cat([noisy, time], 1)) - noise).square().mean() / 2

    def step(self, batch):
        self.optimizer.zero_grad()
        for loss in self.losses(batch):
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        info = self.scaler.update()
        if info.applied:
            self.ema.update_parameters(self.model)


class Recommender(_Loop):
    """A sparse table and a dense part, and a norm for the log."""

    def __init__(self, scaler):
        self.scaler, self.norms = scaler, []
        self.model = nn.ModuleDict({"table": nn.EmbeddingBag(20, 4, mode="sum", sparse=True), "top": nn.Linear(4, 1)})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, batch):
        ids = _data(batch).mul(9).long() % 20
        clicks = torch.arange(8) % 2
        score = self.model["top"](self.model["table"](ids))[:, 0]
        self.optimizer.zero_grad()
        self.scaler.scale(nn.functional.binary_cross_entropy_with_logits(score, clicks.float())).backward()
        self.scaler.unscale_(self.optimizer)
        self.norms.append(float(self.model["top"].weight.grad.norm()))
        self.scaler.step(self.optimizer)
        self.scaler.update()
