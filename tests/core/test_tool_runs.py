"""Recorded runs of the originals that a policy can express, reproduced step for step.

Each run in `tool_runs.json` was made by the named tool's own class; here stands the policy that behaves like it. Not
among them: Chainer, since its growth is not a policy of this library, and MXNet, since its scale acts one step late.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from lossscale_core import DynamicScaling
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core.testing import simulate

RUNS = json.loads((Path(__file__).parent / "tool_runs.json").read_text())
UNBOUNDED = {"min_scale": SMALLEST_SCALE, "max_scale": LARGEST_SCALE}
NO_CEILING = {"max_scale": LARGEST_SCALE}
TENSORFLOW = DynamicScaling(init_scale=1024.0, growth_interval=3, **NO_CEILING)
KERAS_3 = DynamicScaling(init_scale=1024.0, growth_interval=3, **UNBOUNDED)
TORCH = DynamicScaling(growth_interval=3, **UNBOUNDED)
MEGATRON = DynamicScaling(growth_interval=3, hysteresis=2, refill_on_finite=False, **NO_CEILING)

POLICIES = {
    "flax_DynamicScale": DynamicScaling(init_scale=1024.0, growth_interval=4, **UNBOUNDED),  # grows one step late
    "jmp_DynamicLossScale": TENSORFLOW,
    "keras3_LossScaleOptimizer_jax": KERAS_3,
    "keras3_LossScaleOptimizer_tensorflow": KERAS_3,
    "keras3_LossScaleOptimizer_torch": KERAS_3,
    "paddle_GradScaler_dygraph": DynamicScaling(
        init_scale=1024.0, growth_interval=3, refill_on_backoff=True, **UNBOUNDED
    ),
    "tf2.4_keras_mixed_precision_LossScaleOptimizer": TENSORFLOW,
    "tf_keras_LossScaleOptimizer": TENSORFLOW,
    "apex_amp_loss_scaler": DynamicScaling(growth_interval=3, min_scale=SMALLEST_SCALE, max_scale=2.0**24),
    "deepspeed_loss_scaler": DynamicScaling(growth_interval=3, cooldown=1, refill_on_finite=False, **NO_CEILING),
    "megatron_grad_scaler": MEGATRON,
    "torch_gradscaler": TORCH,
}


def test_every_recorded_run_has_a_policy():
    """No recorded run is left aside, and no policy stands for a run that is not there."""
    assert POLICIES.keys() == RUNS.keys()


@pytest.mark.parametrize("tool", POLICIES)
def test_the_policy_reproduces_the_original(tool):
    """The scale after every step is the original's, to the last bit."""
    run = RUNS[tool]
    trace = simulate(POLICIES[tool], [flag == "0" for flag in run["overflow"]])
    np.testing.assert_array_equal(trace.loss_scale_after, np.array(run["scale_after"], dtype=np.float32))
