"""`ScaleWatch` and `diagnose` on random runs: healthy runs are called healthy, and problems are reported in time."""

import logging

import numpy as np
import pytest

import lossscale_core as core
from lossscale import from_tool, tools
from tests.sweeping import IS_SWEEP

pytestmark = pytest.mark.filterwarnings("ignore:the state continues under another policy")
RUNS = 250 if IS_SWEEP else 12
PRESETS = [from_tool(tool, {}) for tool in tools() if tool != "jmp"]  # jmp has no default
PROBLEMS = ("skipping too often: ", "stuck at min_scale: ", "broken: ")
INTERVALS = pytest.mark.parametrize(("number", "every"), [*enumerate([1, 7, 32, 200])])


class _Run:
    """A run under a random policy, whose gradients fit a loss scale of about `fit`; it may be resumed, or retry."""

    def __init__(self, seed, caplog, *policies):
        caplog.set_level(logging.DEBUG, "lossscale")
        self.random, self.caplog, self.policies = np.random.default_rng(seed), caplog, [*PRESETS, *policies]
        self.fit, self.sigma = 2.0 ** self.random.uniform(3.0, 30.0), self.random.uniform(0.0, 0.6)
        self.retries, self.retried = self.random.choice([0, 0, 8]), 0
        self.policy, self.watch = self.draw_policy(), core.ScaleWatch()
        self.state = self.policy.init_state()
        if self.random.random() < 0.3:
            for _ in range(self.random.choice([3, 60, 400])):
                self.step()
            entries, self.policy = core.state_to_dict(self.state, self.policy), self.draw_policy()
            self.state = core.state_from_dict(entries, self.policy)

    def draw_policy(self):
        """Return a preset of a tool, or a policy with a start from 2**-3 to 2**30."""
        start = core.DynamicScaling(init_scale=2.0 ** self.random.integers(-3, 31), min_scale=2.0**-126)
        choices = [*self.policies, *[start] * 8]
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
        steps, skipped = (count - np.int32(self.retried) for count in (self.state.steps, self.state.skipped_steps))
        return self.state._replace(steps=steps, skipped_steps=skipped)

    def look(self, state):
        """Return what the watch logs, and what `diagnose` says."""
        self.caplog.clear()
        self.watch.log(self.policy, state)
        return [*self.caplog.messages, core.diagnose(self.policy, state)]


@INTERVALS
def test_a_healthy_run_causes_no_alarm(number, every, caplog):
    """No verdict is a problem while some loss scale fits the gradients; a run calibrates before its fifth step only."""
    for seed in range(RUNS):
        run = _Run([number, seed], caplog)
        for step in range(run.random.choice([60, 400, 3000])):
            state = run.step()
            wrong = PROBLEMS if state.steps - state.skipped_steps < 5 else (*PROBLEMS, "calibrating: ")
            if step % every == 0:
                assert not [text for text in run.look(state) if any(verdict in text for verdict in wrong)], seed


@INTERVALS
def test_each_problem_is_reported_in_time(number, every, caplog):
    """After five overflows in a row, at the start after those that reach `min_scale` and five more, at the next look.

    From some step on, gradients are not finite, or overflow at `min_scale`, too.
    """
    for seed in range(RUNS):
        run = _Run([number, seed], caplog, core.NoScaling(), core.FixedScaling(8.0))
        for step in range(run.random.choice([0, 3, 40, 400])):
            state = run.step()
            if step % every == 0:
                run.look(state)
        low, applied = run.policy.bounds()[0], run.state.steps - run.state.skipped_steps
        run.fit, run.sigma = run.random.choice([0.0, low / 2.0]), 0.0
        overflows, logged = 0, []
        while overflows < 5 or state.steps % every:
            overflows += bool(applied >= 5 or run.state.loss_scale <= low)
            state = run.step()
            logged += run.look(state)[:-1] if state.steps % every == 0 else []
        assert any(verdict in line for line in logged for verdict in PROBLEMS), (seed, logged)
        for _ in range(200):  # `diagnose` knows no other scale than the policy's first one
            run.step()
        assert core.diagnose(run.policy, run.state).startswith(PROBLEMS), seed
