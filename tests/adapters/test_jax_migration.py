"""What jmp's and flax's scalers did, a translated policy does; and a state saved with Orbax continues where it was."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_jax import get_scale_state, loss_scaled, scale


@pytest.mark.filterwarnings("default")  # what Orbax warns of is Orbax's
@pytest.mark.parametrize("settings", [
    pytest.param({}, id="plain"),
    pytest.param({"max_norm": 1.0, "guard": SpikeGuard()}, id="guarded"),
])  # fmt: skip
def test_orbax(settings, tmp_path):
    """The whole optimizer state is a pytree: a run continued from a checkpoint is bit for bit the run without one."""
    policy = DynamicScaling(init_scale=2.0**20, growth_interval=3)
    optimizer = loss_scaled(optax.adam(0.1), policy, **settings)

    @jax.jit
    def step(params, opt_state):
        def loss(params):
            return scale(jnp.sum(params.astype(jnp.float16) ** 2).astype(jnp.float32), get_scale_state(opt_state))

        return optimizer.apply_gradients(jax.grad(loss)(params), opt_state, params)

    carry = jnp.ones(3), optimizer.init(jnp.ones(3))
    for _ in range(7):
        carry = step(*carry)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", carry)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: carry))
    assert get_scale_state(restored[1]).skipped_steps > 0
    for _ in range(5):
        carry, restored = step(*carry), step(*restored)
        jax.tree.map(np.testing.assert_array_equal, carry, restored)
