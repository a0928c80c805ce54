"""Recorded runs of the originals that a policy can express, reproduced step for step.

Each run in `tool_runs.json` was made by the named tool's own class; here stands the policy that behaves like it. Not
among them: Chainer, since its growth is not a policy of this library, and MXNet, since its scale acts one step late.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lossscale_core import DynamicScaling, TolerantScaling
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE
from lossscale_core.testing import overflow_traces, simulate

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
    "mindspore_loss_scale": DynamicScaling(init_scale=2.0**15, growth_interval=10, **NO_CEILING),
    "openseq2seq_AutomaticLossScaler": DynamicScaling(init_scale=2.0**14, max_scale=2.0**14),
    "paddle_GradScaler_dygraph": DynamicScaling(
        init_scale=1024.0, growth_interval=3, refill_on_backoff=True, **UNBOUNDED
    ),
    "paddle_update_loss_scaling_op": DynamicScaling(
        init_scale=1024.0, growth_interval=3, refill_on_backoff=True, **NO_CEILING
    ),
    "tf2.1_keras_experimental_LossScaleOptimizer": TENSORFLOW,
    "tf2.2_keras_experimental_LossScaleOptimizer": TENSORFLOW,
    "tf2.3_keras_experimental_LossScaleOptimizer": TENSORFLOW,
    "tf2.4_keras_mixed_precision_LossScaleOptimizer": TENSORFLOW,
    "tf_compat_v1_DynamicLossScale": TENSORFLOW,
    "tf_contrib_ExponentialUpdateLossScaleManager": DynamicScaling(
        init_scale=2.0**15,
        growth_interval=10,
        backoff_factor=0.8,
        hysteresis=2,
        refill_on_finite=False,
        refill_on_backoff=True,
        **NO_CEILING,
    ),
    "tf_keras_LossScaleOptimizer": TENSORFLOW,
    "apex_amp_loss_scaler": DynamicScaling(growth_interval=3, min_scale=SMALLEST_SCALE, max_scale=2.0**24),
    "apex_fp16_utils_dynamic_loss_scaler": DynamicScaling(growth_interval=3, **NO_CEILING),
    "apex_update_scale_hysteresis_kernel": DynamicScaling(growth_interval=3, hysteresis=2, **UNBOUNDED),
    "colossalai_dynamic_grad_scaler": DynamicScaling(
        growth_interval=3, hysteresis=2, refill_on_finite=False, max_scale=2.0**18
    ),
    "deepspeed_loss_scaler": DynamicScaling(growth_interval=3, cooldown=1, refill_on_finite=False, **NO_CEILING),
    "fairseq_dynamic_loss_scaler": TolerantScaling(init_scale=128.0, growth_interval=3, tolerance=0.0, **UNBOUNDED),
    "megatron_grad_scaler": MEGATRON,
    "megatron_v1_dynamic_loss_scaler": MEGATRON,
    "torch_gradscaler": TORCH,
    "torch_sharded_gradscaler": TORCH,
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


@given(st.sampled_from([0.0, 0.05, 0.1, 0.25, 1 / 3, 0.5, 0.9]), st.integers(1, 12), overflow_traces(max_steps=300))
def test_tolerant_scaling_is_fairseqs_rule(tolerance, window, grads_finite):
    """Against fairseq's own bookkeeping: iteration numbers, and a count of overflows that growth does not clear."""
    policy = TolerantScaling(init_scale=1.0, growth_interval=window, tolerance=tolerance, **UNBOUNDED)
    scale, overflows, last_overflow, last_rescale = 1.0, 0, -1, -1
    expected = []
    for iteration, finite in enumerate(grads_finite):
        if finite and (iteration - last_overflow) % window == 0:
            scale, last_rescale = scale * 2.0, iteration
        elif not finite:
            last_overflow, overflows = iteration, overflows + 1
            if overflows / (iteration - last_rescale) >= tolerance:
                scale, last_rescale, overflows = scale / 2.0, iteration, 0
        expected.append(scale)
    assume(all(SMALLEST_SCALE < scale < LARGEST_SCALE for scale in expected))
    assert simulate(policy, grads_finite).loss_scale_after.tolist() == expected
