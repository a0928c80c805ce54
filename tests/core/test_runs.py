"""`ScaleWatch` and `diagnose` on random runs: healthy runs are called healthy, and problems are reported in time."""

import logging
import warnings

import numpy as np
import pytest

from lossscale import from_tool, tools
from lossscale_core import (
    DynamicScaling,
    FixedScaling,
    NoScaling,
    ScaleWatch,
    diagnose,
    state_from_dict,
    state_to_dict,
)
from lossscale_core.errors import CheckpointWarning
from tests.sweeping import IS_SWEEP

RUNS = range(1000 if IS_SWEEP else 50)
PRESETS = [from_tool(tool, {}) for tool in tools() if tool != "jmp"]  # jmp has no default
PROBLEMS = ("skipping too often", "stuck at min_scale", "broken")


class _Run:
    """A run under a random policy, whose gradients fit a loss scale of about `fit`; it may be resumed, or retry."""

    def __init__(self, seed, *policies):
        self.random = np.random.default_rng(seed)
        self.fit, self.sigma = 2.0 ** self.random.uniform(3.0, 30.0), self.random.uniform(0.0, 0.6)
        self.retries, self.retried = self.random.choice([0, 0, 8]), 0
        self.policy = self._draw(policies)
        self.state = self.policy.init_state()
        self.is_resumed = self.random.random() < 0.3
        if self.is_resumed:
            for _ in range(self.random.choice([3, 60, 400])):
                self.step()
            saved, self.policy = state_to_dict(self.state, self.policy), self._draw(policies)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointWarning)
                self.state = state_from_dict(saved, self.policy)

    def _draw(self, policies):
        init_scale = 2.0 ** self.random.integers(-3, 31)
        choices = [*PRESETS, *policies, *[DynamicScaling(init_scale=init_scale, min_scale=2.0**-126)] * 8]
        return choices[self.random.integers(len(choices))]

    def step(self):
        """Take a step, which may take several tries, and return the state as `GradScaler` shows it to its watch."""
        tries = [self.state]
        for _ in range(self.retries + 1):
            fits = bool(tries[-1].loss_scale <= self.fit * np.exp(self.sigma * self.random.standard_normal()))
            tries.append(self.policy.update(tries[-1], fits))
            if fits:
                self.retried += len(tries) - 2
                break
        self.state = tries[-1 if fits else 1]  # if no try fits, only the first one counts
        return self.state._replace(
            steps=self.state.steps - np.int32(self.retried),
            skipped_steps=self.state.skipped_steps - np.int32(self.retried),
        )

    def texts(self, watch, state, caplog):
        """Return what a look logs, and what `diagnose` says."""
        caplog.clear()
        watch.log(self.policy, state)
        return [*caplog.messages, diagnose(self.policy, state)]


@pytest.mark.parametrize("every", [1, 7, 32, 200])
def test_a_healthy_run_is_never_called_a_problem(every, caplog):
    """A run is healthy if some loss scale fits its gradients. It calibrates before its fifth applied step only."""
    caplog.set_level(logging.DEBUG, "lossscale")
    for seed in RUNS[every % 4 :: 4]:
        run, watch = _Run(seed), ScaleWatch()
        for step in range(run.random.choice([60, 400, 3000])):
            state = run.step()
            verdicts = PROBLEMS if state.steps - state.skipped_steps < 5 else (*PROBLEMS, "calibrating: ")
            if step % every == 0:
                texts = run.texts(watch, state, caplog)
                assert not [text for text in texts if any(verdict in text for verdict in verdicts)], seed


@pytest.mark.parametrize("every", [1, 7, 32, 200])
def test_each_problem_is_reported_in_time(every, caplog):
    """After five overflows in a row, at the start after those that reach `min_scale` and five more, at the next look.

    From a step on gradients are not finite, or overflow at `min_scale`, too.
    """
    caplog.set_level(logging.DEBUG, "lossscale")
    for seed in RUNS[every % 4 :: 4]:
        run, watch = _Run(seed, NoScaling(), FixedScaling(8.0)), ScaleWatch()
        for step in range(run.random.choice([0, 3, 40])):
            state = run.step()
            if step % every == 0:
                run.texts(watch, state, caplog)
        low, applied = run.policy.bounds()[0], run.state.steps - run.state.skipped_steps
        run.fit, run.sigma = run.random.choice([0.0, low / 2.0]), 0.0
        overflows, is_late, logged, text = 0, False, [], ""
        while not is_late:
            overflows += bool(applied >= 5 or run.state.loss_scale <= low)
            state = run.step()
            if state.steps % every == 0:
                is_late = overflows >= 5
                *new, text = run.texts(watch, state, caplog)
                logged += new
        assert any(verdict in line for line in logged for verdict in PROBLEMS), (seed, logged)
        assert any(verdict in text for verdict in PROBLEMS), (seed, text)
