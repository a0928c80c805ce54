"""A user's code, for type checkers alone: `nox -s typing` runs mypy and pyright on it, as strictly as they can."""

from typing import Any, NamedTuple, assert_type

import numpy as np
from numpy.typing import NDArray

import lossscale_core as core
from lossscale import from_tool, state_from_tool
from lossscale_core import DynamicScaling, FixedScaling, NoScaling, ScaleState, ScalingPolicy, StepInfo, testing

HostState = ScaleState[np.float32 | np.int32]
Params = dict[str, NDArray[np.float32]]


def report(before: ScaleState, after: ScaleState) -> tuple[str, dict[str, Any], StepInfo, dict[str, Any]]:
    """Report on the states that the policies' own `init_state` returns."""
    core.check_limits("dynamic", after)
    return (
        core.diagnose("dynamic", after),
        core.metrics(after),
        core.step_info(before, after),
        core.state_to_dict(after, "dynamic"),
    )


def train(params: Params, grads: Params) -> Params:
    """Take a step with the five verbs on NumPy."""
    policy = DynamicScaling(growth_interval=100)
    assert_type(policy, DynamicScaling)
    assert_type(core.init_state(policy), ScaleState)
    state = policy.init_state()
    assert_type(state, HostState)
    report(state, state)
    assert_type(core.scale(0.5, state), np.floating[Any])
    assert_type(core.scale(np.float16(0.5), state), np.floating[Any])
    finite = core.all_finite(grads)
    assert_type(finite, np.bool_)
    unscaled = core.unscale(grads, state)
    assert_type(unscaled, Params)
    moved: Params = {name: (params[name] - 0.1 * unscaled[name]).astype(np.float32) for name in params}
    after = policy.update(state, finite)
    assert_type(after, HostState)
    info = core.step_info(state, after)
    assert_type(info, StepInfo[np.float32 | np.int32, np.float32 | np.int32 | np.bool_])
    assert_type(info.applied, np.float32 | np.int32 | np.bool_)
    assert_type(info.loss_scale_after, np.float32 | np.int32)
    assert_type(core.metrics(after), dict[str, np.float32 | np.int32])
    assert_type(after._replace(loss_scale=np.float32(1.0)), HostState)
    return core.select(finite, moved, params)


def choose_policies(path: str, any_policy: ScalingPolicy) -> list[ScalingPolicy]:
    """Make policies of everything that describes one."""
    assert_type(core.as_policy("dynamic"), DynamicScaling)
    assert_type(core.as_policy("none"), NoScaling)
    assert_type(core.as_policy(1024.0), FixedScaling)
    assert_type(core.init_state("dynamic").loss_scale, Any)
    read = from_tool("torch", {"growth_interval": 100})
    return [core.as_policy(path), core.as_policy(core.policy_to_dict(any_policy)), core.load_policy(path), read]


def go_on(saved: dict[str, Any], checkpoint: dict[str, Any]) -> HostState:
    """Restore states of this library and of another tool, and try a policy on a run."""
    assert_type(state_from_tool("torch", checkpoint), ScaleState)
    trace = testing.simulate(DynamicScaling(growth_interval=2), [True, True, False])
    assert_type(trace, testing.Trace)
    assert_type(trace.loss_scale_after, NDArray[np.float32])
    return core.state_from_dict(saved, DynamicScaling())


class OwnState(NamedTuple):
    """The state of a policy of the user's own; where it goes into the library, it is `Any`."""

    loss_scale: Any
    steps: Any


class OwnPolicy:
    """A policy of the user's own, with the two methods that it needs."""

    def init_state(self) -> Any:
        """Return the state before the first step."""
        return OwnState(1.0, 0)

    def update(self, state: OwnState, grads_finite: Any, *, xp: Any = None) -> OwnState:
        """Return the state after a step."""
        return state._replace(steps=state.steps + 1)


def use_own_policy() -> str:
    """Pass a policy of the user's own in place of the library's."""
    policy = OwnPolicy()
    assert_type(core.as_policy(policy), OwnPolicy)
    saved = core.state_to_dict(policy.init_state(), policy)
    choose_policies("policy.toml", policy)
    return core.diagnose(policy, core.state_from_dict(saved, policy))


def make_mistakes(state: ScaleState) -> None:
    """Make mistakes that a type checker has to find: `--warn-unused-ignores` says where it does not."""
    core.diagnose(object(), state)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    core.scale(1.0, object())  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    state.scale  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    DynamicScaling(growth_interval="100")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    core.DynamicScalling  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
