"""The rules that other tools publish for their scale, each in plain Python, for comparison with `from_tool`.

A model takes the tool's own keywords, moves by `step(overflow)`, and saves what the tool saves. `DRAWN` draws configs
for each of them; tools that the adapters' tests run themselves need none. `PLACED` has the layouts that tools save. No
model uses a policy of this library.
"""

import numpy as np
from hypothesis import strategies as st


class Counted:
    """The scale grows where a count of finite steps in a row equals an interval, and falls on an overflow."""

    def __init__(self, scale, up, down, interval, floor=0.0):
        self.scale, self.up, self.down, self.interval, self.floor, self.count = scale, up, down, interval, floor, 0

    def step(self, overflow):
        if overflow:
            self.count = 0
            self.overflowed()
        else:
            self.count += 1
            self.was_finite(grows=self.count == self.interval)

    def overflowed(self):
        self.scale = max(self.scale * self.down, self.floor)

    def was_finite(self, grows):
        if grows:
            self.count = 0
            self.scale *= self.up


class Megatron(Counted):
    """Falls once so many overflows came since the last growth, whatever came between."""

    def __init__(
        self, initial_scale=2.0**32, min_scale=1.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=1000,
        hysteresis=2,
    ):  # fmt: skip
        super().__init__(initial_scale, growth_factor, backoff_factor, growth_interval, min_scale)
        self.allowed = self.left = hysteresis

    def overflowed(self):
        self.left -= 1
        if self.left <= 0:
            super().overflowed()

    def was_finite(self, grows):
        super().was_finite(grows)
        self.left = self.allowed if grows else self.left

    def saved(self):
        return {"scale": [self.scale], "growth_tracker": self.count, "hysteresis_tracker": self.left}


class Paddle(Counted):
    """Falls on every so-many-th overflow of a row."""

    def __init__(
        self, init_loss_scaling=65536.0, incr_ratio=2.0, decr_ratio=0.5, incr_every_n_steps=2000,
        decr_every_n_nan_or_inf=1,
    ):  # fmt: skip
        super().__init__(init_loss_scaling, incr_ratio, decr_ratio, incr_every_n_steps)
        self.allowed, self.bad = decr_every_n_nan_or_inf, 0

    def overflowed(self):
        self.bad += 1
        if self.bad == self.allowed:
            self.bad = 0
            super().overflowed()

    def was_finite(self, grows):
        super().was_finite(grows)
        self.bad = 0

    def saved(self):
        settings = {"incr_every_n_steps": self.interval, "decr_every_n_nan_or_inf": self.allowed}
        return {"scale": [self.scale], **settings, "incr_count": self.count, "decr_count": self.bad}


class DeepSpeed:
    """Iterations are numbered; the scale grows on every window-th after the last overflow, counting one step fewer.

    It falls where one tolerated overflow is left; it stays left until growth, or a finite step, restores them.
    """

    def __init__(
        self, initial_scale_power=16, loss_scale_window=1000, hysteresis=2, consecutive_hysteresis=False,
        min_loss_scale=1,
    ):  # fmt: skip
        self.scale, self.window, self.floor = 2.0**initial_scale_power, loss_scale_window, min_loss_scale
        self.allowed = self.left = hysteresis
        self.restores_at_once = consecutive_hysteresis
        self.now, self.last = 0, -1

    def step(self, overflow):
        since = self.now - self.last - 1
        if overflow and self.left != 1:
            self.left -= 1
        elif overflow:
            self.scale = max(self.scale / 2.0, self.floor)
        elif self.restores_at_once:
            self.left = self.allowed
        if overflow:
            self.last = self.now
        elif since > 0 and since % self.window == 0:
            self.scale *= 2.0
            self.left = self.allowed
        self.now += 1

    def saved(self):
        settings = {"scale_factor": 2.0, "scale_window": self.window}
        shifts = {"delayed_shift": self.allowed, "consecutive_hysteresis": self.restores_at_once}
        counts = {"cur_scale": self.scale, "cur_iter": self.now, "last_overflow_iter": self.last}
        return {**counts, **settings, **shifts, "cur_hysteresis": self.left}


_SCALE = st.integers(3, 24).map(lambda power: 2.0**power)
_WINDOW, _COUNT = st.integers(1, 9), st.integers(0, 4)
_UP, _DOWN = st.sampled_from([2.0, 2.0, 4.0, 1.5]), st.sampled_from([0.5, 0.5, 0.25, 0.8])
_DEEPSPEED = {
    "initial_scale_power": st.integers(0, 20),
    "consecutive_hysteresis": st.booleans(),
    "min_loss_scale": st.sampled_from([1, 1.0]),
}
_MEGATRON = {
    "initial_scale": _SCALE,
    "min_scale": st.sampled_from([1.0, 0.5, 4.0]),
    "growth_factor": _UP,
    "backoff_factor": _DOWN,
    "hysteresis": st.integers(1, 4),
}
_PADDLE = {"init_loss_scaling": _SCALE, "incr_ratio": _UP, "decr_ratio": _DOWN, "decr_every_n_nan_or_inf": _COUNT}
DRAWN = {
    "deepspeed": (DeepSpeed, {"loss_scale_window": _WINDOW | _WINDOW.map(float), "hysteresis": _COUNT}, _DEEPSPEED),
    "megatron": (Megatron, {"growth_interval": _WINDOW | st.just(2.5)}, _MEGATRON),
    "paddle": (Paddle, {"incr_every_n_steps": st.integers(-1, 9)}, _PADDLE),
}
"""Models, the keys that each config has, and those that it may have."""

PLACED = [
    ("torch", {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 7}),
    ("apex", {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 7}}),
    ("apex", {"loss_scale": 8.0, "unskipped": 7}),
    ("apex", {"dynamic": True, "_loss_scale": 8.0, "_unskipped": 7, "_min_loss_scale": None}),
    ("deepspeed", {"loss_scaler": {"cur_scale": 8, "cur_iter": 1020, "last_overflow_iter": 11, "scale_window": 1000}}),
    ("deepspeed", {"cur_scale": 8.0, "cur_iter": 20, "last_overflow_iter": 11, "scale_window": 9, "dtype": "half"}),
    ("megatron", {"grad_scaler": {"scale": [8.0], "growth_tracker": 7, "hysteresis_tracker": -3}}),
    ("megatron", {"_scale": np.array([8.0]), "_growth_tracker": 7, "_hysteresis_tracker": 1, "min_scale": 1.0}),
    ("keras", {"opt/loss_scale/current_loss_scale/.ATTRIBUTES/VARIABLE_VALUE": 8.0, "opt/loss_scale/good_steps:0": 7}),
    ("keras", {"loss_scale": np.float32(8.0), "dynamic_counter": np.int64(7)}),
    ("keras3", {"dynamic_scale": np.float32(8.0), "step_counter": 7}),
    ("jmp", {"loss_scale": np.float32(8.0), "counter": np.int32(7), "period": 2000}),
    ("flax", {"fin_steps": np.int32(7), "scale": np.float32(8.0)}),
    ("paddle", {"scale": np.array([8.0]), "incr_count": 7, "decr_count": 0, "decr_every_n_nan_or_inf": 1}),
    ("paddle", {"_scale": np.array([8.0]), "_incr_count": 7, "_decr_count": 0, "_decr_every_n_nan_or_inf": 1}),
]
"""Tools by name, and what they save where the scale is 8, after seven finite steps."""
