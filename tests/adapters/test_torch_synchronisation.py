"""How often a step waits for its device, counted; and what `torch.compile` makes of a changing scale."""

import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from lossscale_core import SpikeGuard
from lossscale_torch import GradScaler
from tests.adapters.emulated_device import Emulated
from tests.adapters.torch_steps import CALLS, EITHER_KIND, INF


def _reads(call, fused, finite=True, protects=False, **settings):
    """Return how often the host waits for the device in a step, past the first two."""
    with Emulated("mps") as device:
        model = torch.nn.Identity()
        model.register_buffer("passes", torch.zeros((), device="mps"))
        params = [torch.nn.Parameter(torch.ones(3, device="mps")) for _ in range(5)]
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=fused)
        scaler = GradScaler("mps", **settings, protect=[model] if protects else ())
        for _ in range(3):
            before = device.reads
            scaler.place_on("mps")
            model.passes += model(1.0)
            for _ in range(5):
                scaler.attach(torch.ones(3, device="mps"), scaler.scale(torch.ones((), device="mps")))
            for param in params:
                param.grad = torch.full((3,), 1.0 if finite else INF, device="mps")
            CALLS[call](scaler, optimizer)
            scaler.step(optimizer)
            scaler.update()
            scaler.metrics()
        return device.reads - before


@pytest.mark.parametrize("settings", [{}, {"guard": SpikeGuard()}, {"protects": True}], ids=["", "guard", "protect"])
@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("call", CALLS)
@EITHER_KIND
def test_how_often_a_step_waits(fused, call, finite, settings):
    """The host waits once for a finite step of an ordinary optimizer, and never for a fused one or for metrics."""
    is_clipped_twice = call == "unscale_and_clip_" and not finite
    # An overflow adds a wait for all losses together, and another one to clip a norm that is not finite.
    assert _reads(call, fused, finite, **settings) == (0 if fused else 1 + (not finite) + is_clipped_twice)


@pytest.mark.filterwarnings("default:The .grad attribute")  # Dynamo's own, where it resumes within a training step
@EITHER_KIND
def test_a_compiled_step_serves_every_scale(fused):
    """A training step may be compiled, though not as one graph, and a changing scale does not compile it again."""
    torch._dynamo.reset()
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    frames = CompileCounter()

    def train(x):
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    counts, scales, compiled = [], set(), torch.compile(train, backend=frames)
    for step in range(12):
        before = model.bias.detach().clone()
        compiled(torch.full((2, 4), INF if step % 3 == 2 else 1.0))
        assert torch.equal(before, model.bias) == (step % 3 == 2)
        scales.add(scaler.get_scale())
        counts.append(frames.frame_count)
    assert len(scales) > 4
    assert counts[-1] == counts[3], counts
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(train, backend="eager", fullgraph=True)(torch.ones(2, 4))


def test_importing_leaves_the_compiler_alone():
    """It takes longer to import than this package, and a plain loop has no use for it."""
    code = "import sys, lossscale_torch; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
