"""A run with a spike guard: the norm of the gradients at each step, and what the policy and the guard make of it."""

import numpy as np

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_core.testing import simulate

POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=3)
GUARD = SpikeGuard(warmup=4, memory=8)
STEPS = 48
SPIKES, OVERFLOWS = [10, 11, 20, 30, 40], [3, 12, 21, 33, 34]
NORMS = np.exp(0.3 * np.random.default_rng(0).standard_normal(STEPS)).astype(np.float32)
NORMS[SPIKES] *= 50
NORMS[OVERFLOWS] = np.inf
EXPECTED = simulate(POLICY, np.isfinite(NORMS), norms=NORMS, guard=GUARD)
