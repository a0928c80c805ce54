"""Programs of the docs, run on a CPU, and a model in float16 with bad gradients in some of its steps."""

import math

import torch

from tests.adapters.pages import code_of

OVERFLOWS = {0, 2, 5}
"""Steps with infinite gradients, of eight steps."""
ON_A_CPU = {
    '"cuda"': '"cpu"',
    'Accelerator(mixed_precision="fp16")': "in_float16(Accelerator(cpu=True))",
    "trainer.accelerator.scaler": "in_float16(trainer.accelerator).scaler",
}
"""The replacements for code that needs a GPU."""


def in_float16(accelerator):
    """Apply the effect of `mixed_precision="fp16"`, which Accelerate refuses on a CPU."""
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
    return accelerator


def source_of(heading, replaced=(), page="docs/trainers.md", **options):
    """Return the code of a recipe on a CPU, with further replacements."""
    source = code_of(page, heading, **options)
    for old, new in dict(replaced).items():
        assert old in source
        source = source.replace(old, new)
    for old, new in ON_A_CPU.items():
        source = source.replace(old, new)
    return source


def run_recipe(heading, names, replaced=(), **options):
    """Run a recipe with these names, and return all names."""
    names = {"torch": torch, "in_float16": in_float16, **names}
    exec(compile(source_of(heading, replaced, **options), heading, "exec"), names)
    return names


def data_of(steps=8):
    """Return pairs of inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(steps)]


def loss_fn(outputs, targets=1.0):
    """Return the mean squared error in float32."""
    return (outputs.float() - targets).square().mean()


class Model(torch.nn.Module):
    """A linear layer in float16; the gradients of some steps are multiplied by a factor, by default infinity.

    It keeps the weights before each step. With labels it returns its loss, as the models of transformers do.
    """

    def __init__(self, bad=OVERFLOWS, first=0):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.bad = bad if isinstance(bad, dict) else dict.fromkeys(bad, math.inf)
        self.first, self.weights = first, []
        self.layer.weight.register_hook(self._spoil)

    def _spoil(self, grad):
        self.weights.append(self.layer.weight.detach().clone())
        return grad * self.bad.get(self.first + len(self.weights) - 1, 1.0)

    def forward(self, inputs, labels=None):
        with torch.autocast("cpu", torch.float16):
            outputs = self.layer(inputs.float().expand(-1, 4))
        return outputs if labels is None else {"loss": loss_fn(outputs, labels)}

    def skipped(self):
        """Return the steps that left the weights unchanged."""
        weights = [*self.weights, self.layer.weight.detach()]
        return {self.first + n for n in range(len(weights) - 1) if torch.equal(weights[n], weights[n + 1])}


def optimizer_of(model, fused=False):
    """Return an optimizer and a schedule that halves the learning rate in each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def bits(*states):
    """Return the numbers in state dicts and tensors, which are equal only if all bits are equal."""
    leaves = torch.utils._pytree.tree_leaves(states)
    return [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
