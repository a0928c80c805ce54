"""One update body serves every framework: the same states, dtypes and shapes, eagerly, traced and compiled."""

import random

import pytest
import torch
from backends import BACKENDS

from lossscale_core import DynamicScaling, FixedScaling, NoScaling, TolerantScaling, init_state, state_to_dict

POLICIES = {
    "none": NoScaling(),
    "fixed": FixedScaling(1024.0),
    "torch": DynamicScaling(growth_interval=3, min_scale=2.0**-126, max_scale=2.0**126),
    "megatron": DynamicScaling(growth_interval=4, hysteresis=2, refill_on_finite=False),
    "paddle": DynamicScaling(growth_interval=2, hysteresis=2, refill_on_backoff=True, max_scale=2.0**18),
    "contrib": DynamicScaling(growth_interval=3, hysteresis=3, refill_on_finite=False, refill_on_backoff=True),
    "deepspeed": DynamicScaling(growth_interval=3, cooldown=1, min_scale=2.0**10),
    "top": DynamicScaling(init_scale=2.0**120, growth_interval=1, growth_factor=16.0, max_scale=2.0**126),
    "fairseq": TolerantScaling(growth_interval=3, tolerance=0.25),
}


def _trace(steps: int = 120) -> list[bool]:
    rng = random.Random(0)
    return [rng.random() > 0.3 for _ in range(steps)]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_every_backend_reaches_the_states_of_the_host(backend, policy):
    """States agree bit for bit with host scalars at every step, and no field changes its dtype or shape."""
    trace = _trace()
    reference = list(BACKENDS[0].run(policy, trace))
    for step, (state, expected) in enumerate(zip(backend.run(policy, trace), reference, strict=True)):
        assert state_to_dict(state) == state_to_dict(expected), f"step {step}"
        for name, value in state._asdict().items():
            assert getattr(expected, name).dtype.name in str(value.dtype), f"step {step}: {name} is {value.dtype}"
            assert tuple(value.shape) == (), f"step {step}: {name} has shape {value.shape}"


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_update_needs_no_values(policy):
    """torch's `meta` device has shapes but no values: an update that read one would raise."""
    state = policy.init_state()
    on_meta = state._make(torch.tensor(value, device="meta") for value in state)
    after = policy.update(on_meta, torch.empty((), dtype=torch.bool, device="meta"), xp=torch)
    assert [(value.dtype, value.shape) for value in after] == [(value.dtype, value.shape) for value in on_meta]


@pytest.mark.parametrize("default", [torch.float16, torch.float64])
def test_torch_default_dtype_changes_nothing(default):
    """A plain number in the update stays weak, whatever torch's default dtype is."""
    policy = POLICIES["fairseq"]
    expected = list(BACKENDS[0].run(policy, _trace()))
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        eager = next(backend for backend in BACKENDS if backend.name == "torch-eager")
        assert [state_to_dict(s) for s in eager.run(policy, _trace())] == [state_to_dict(s) for s in expected]
    finally:
        torch.set_default_dtype(before)


def test_namespace_is_inferred_for_torch_and_jax():
    """array-api-compat knows torch and jax, so `xp` may be left out there."""
    import jax.numpy as jnp

    policy = POLICIES["torch"]
    for place in (torch.tensor, jnp.asarray):
        state = policy.init_state()
        after = policy.update(state._make(map(place, state)), place(False))
        assert state_to_dict(after) == state_to_dict(policy.update(state, False))


def test_init_state_places_arrays():
    """`init_state(policy, xp=...)` gives arrays of that namespace with the state's dtypes."""
    import jax.numpy as jnp

    for xp in (torch, jnp):
        state = init_state(POLICIES["fairseq"], xp=xp)
        assert state_to_dict(state) == state_to_dict(POLICIES["fairseq"].init_state())
        assert "float32" in str(state.loss_scale.dtype)
        assert "int32" in str(state.steps.dtype)
