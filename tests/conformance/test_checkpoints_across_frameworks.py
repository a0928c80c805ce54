"""A run that began in one framework continues in another.

The four frameworks round differently, so their weights drift apart by last digits and one of them may overflow a step
before another. What must not differ is what the scale state makes of the same overflows. Each framework therefore
trains the demo in float16, really, and records its flags and states over 300 steps; its checkpoint after step 100 goes
through a file. Then, for every ordered pair:

- the other framework's wrapper takes over the scale state and goes through the flags of the recorded run: its next 200
  states are the recorded ones, bit for bit;
- the other framework takes over weights, Adam's memory and the scale state, and trains the next 200 steps for real,
  overflowing where it overflows: its states are those of one uninterrupted run over all these flags, bit for bit.

In the framework that saved it, everything continues bit for bit: weights and losses, too.
"""

import itertools
import json
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from lossscale.demo import DEFAULT_WEIGHT, Settings
from lossscale.demo._network import load
from lossscale.demo._training import BATCH_SIZE
from lossscale_core import DynamicScaling, policy_from_dict, state_to_dict
from tests.conformance.resuming import Checkpoint, Training
from tests.conformance.travelling import WRAPPERS

FRAMEWORKS = ("numpy", "torch", "jax", "tensorflow")
SAVED_AT, STEPS, SEED = 100, 300, 0
POLICY = DynamicScaling(growth_interval=4, hysteresis=2, refill_on_finite=False, cooldown=1, max_scale=2.0**48)
"""Of which every tracker is on its way at some step."""
PAIRS = list(itertools.product(FRAMEWORKS, FRAMEWORKS))
DIGITS = load()


class Recorded(NamedTuple):
    """What a run did from some step on."""

    finite: list[bool]
    states: list[dict]
    losses: list[float]
    end: Checkpoint


def _train(training, until, at_step=lambda: None):
    """Train until a step, with the demo's own batches, and record it."""
    recorded = Recorded([], [], [], None)
    for images, labels in itertools.islice(DIGITS.batches(until, BATCH_SIZE, SEED), training.steps, None):
        loss, applied = training.step(images, labels)
        recorded.finite.append(applied)
        recorded.states.append(_plain(training.scale_state()))
        recorded.losses.append(loss)
        at_step()
    return recorded._replace(end=training.checkpoint())


def _plain(saved):
    """Leave out the keys that torch's own scaler has besides."""
    return {name: saved[name] for name in state_to_dict(POLICY.init_state(), POLICY)}


def _begin(framework, start=None):
    return Training(Settings(framework, POLICY, DEFAULT_WEIGHT, SEED, STEPS), start)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return a function that trains a framework's run once, and saves its checkpoint after step 100 to a file."""
    folder, runs = tmp_path_factory.mktemp("runs"), {}

    def run(framework):
        if framework not in runs:
            training, file = _begin(framework), folder / f"{framework}.npz"

            def save():
                if training.steps == SAVED_AT:
                    training.checkpoint().save(file)

            runs[framework] = _train(training, STEPS, save), file
        return runs[framework]

    with threadpool_limits(1):
        yield run


def _over(flags):
    """Return the states of one run over these flags, on the host."""
    state, states = POLICY.init_state(), []
    for finite in flags:
        state = POLICY.update(state, finite)
        states.append(state_to_dict(state, POLICY))
    return states


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_recorded_runs_tell_something(uninterrupted, framework):
    """The scale grows and overflows both before and after the checkpoint, and the network learns."""
    run, _ = uninterrupted(framework)
    for part in (slice(0, SAVED_AT), slice(SAVED_AT, STEPS)):
        assert 1 <= run.finite[part].count(False) < len(run.finite[part]) / 2
        assert len({state["loss_scale"] for state in run.states[part]}) > 1
    assert run.losses[-1] < 0.2 < run.losses[0]


@pytest.mark.parametrize(("origin", "target"), list(itertools.product(FRAMEWORKS, WRAPPERS)))
def test_the_next_states_are_those_of_the_uninterrupted_run(uninterrupted, origin, target):
    """Loaded by another framework's wrapper, over the same overflows: 200 states, bit for bit."""
    run, file = uninterrupted(origin)
    step = WRAPPERS[target](Checkpoint.load(file).scale_state, POLICY)
    assert [_plain(step(finite)) for finite in run.finite[SAVED_AT:]] == run.states[SAVED_AT:]


@pytest.mark.parametrize(("origin", "target"), PAIRS)
def test_training_continues_in_another_framework(uninterrupted, origin, target):
    """Weights, optimizer and scale state are transferred; the whole run equals one run over its flags, and learns."""
    run, file = uninterrupted(origin)
    rest = _train(_begin(target, Checkpoint.load(file)), STEPS)
    flags = [*run.finite[:SAVED_AT], *rest.finite]
    assert [*run.states[:SAVED_AT], *rest.states] == _over(flags)
    assert rest.finite.count(False) >= 1
    assert rest.losses[0] == pytest.approx(run.losses[SAVED_AT], rel=0.01)  # on the same batch
    assert rest.losses[-1] < 0.2
    assert rest.end.adam_steps == flags.count(True)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_in_its_own_framework_everything_continues_exactly(uninterrupted, framework):
    """Losses, flags, states, weights and Adam's memory are the uninterrupted run's, bit for bit."""
    run, file = uninterrupted(framework)
    rest = _train(_begin(framework, Checkpoint.load(file)), STEPS)
    assert rest.finite == run.finite[SAVED_AT:]
    assert rest.states == run.states[SAVED_AT:]
    assert rest.losses == run.losses[SAVED_AT:]
    for name in ("weights", "mean", "square"):
        for mine, theirs in zip(getattr(rest.end, name), getattr(run.end, name), strict=True):
            np.testing.assert_array_equal(mine, theirs)


FROZEN = json.loads((Path(__file__).parents[1] / "core/version_1.json").read_text())


@pytest.mark.parametrize("target", WRAPPERS)
@pytest.mark.parametrize("origin", FROZEN)
def test_a_frozen_checkpoint_of_version_1_continues_in_every_framework(origin, target):
    """What each framework saved in the first release is taken over by each, silently, and continues as it did."""
    frozen = FROZEN[origin]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = WRAPPERS[target](frozen["saved"], policy_from_dict(frozen["saved"]["policy"]))
    for finite in frozen["grads_finite"]:
        after = step(finite)
    assert {name: after[name] for name in frozen["after"]} == frozen["after"]
