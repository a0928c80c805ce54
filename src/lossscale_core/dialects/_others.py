"""JAX (jmp and flax), PaddlePaddle and MindSpore."""

from collections.abc import Mapping
from typing import Any

from lossscale_core.dialects import _readings as read
from lossscale_core.dialects._counters import count, since_change, since_overflow, used
from lossscale_core.dialects._readings import FLOOR_OF_ONE, UNBOUNDED
from lossscale_core.dialects._record import Difference, Form, Meaning, Peer, Saved, Settings, key

_CEILING = Difference(
    "The scale grows beyond 2**126, where its reciprocal is no normal float32 number.",
    "It stops at 2**126.",
)


def _jmp_under_jit(settings: Settings, config: Mapping[str, Any]) -> Meaning:
    if config.get("jit") and settings["min_scale"] != 1.0:
        bug = "min_loss_scale is lost under jit, and becomes 1 there and here; leave jit out to keep it"
        return Meaning({**settings, "min_scale": 1.0}, bug)
    return Meaning(settings)


JMP = Peer(
    name="jmp",
    title="`jmp.DynamicLossScale`",
    version="jmp 0.0.4",
    rule="Doubles on the 2000th finite step in a row, halves on every overflow down to 1.",
    forms=(
        Form(
            "constructor",
            (
                key("loss_scale", read.INIT_SCALE),
                key("period", read.INTERVAL_EQUAL, 2000),
                key("factor", read.FACTOR, 2),
                key("min_loss_scale", read.MIN_SCALE, 1.0),
                key("counter", read.left_to_the_state("counter"), 0),
            ),
            {"max_scale": UNBOUNDED["max_scale"]},
            ignored=("jit",),
            adjust=_jmp_under_jit,
        ),
    ),
    saved=(Saved(scale=("loss_scale",), counters={"growth_tracker": count("counter", equal=True)}),),
    differences=(
        Difference(
            "`min_loss_scale` is no part of the pytree: `jit` and `tree_map` reset it to 1.",
            "It is kept. For `jit: true` in the config it is 1, as there, with a warning.",
        ),
        Difference(
            "An overflow *raises* a scale below `min_loss_scale` to it.",
            "An overflow never raises a scale, so a start below the floor is refused.",
        ),
        Difference("`StaticLossScale` and `NoOpLossScale` skip nothing.", "`FixedScaling` and `NoScaling` skip."),
        _CEILING,
    ),
)

FLAX = Peer(
    name="flax",
    title="`flax.training.dynamic_scale.DynamicScale`",
    version="flax 0.12.8",
    rule="Doubles on the 2001st finite step in a row, one later than `growth_interval` says; halves on every overflow.",
    forms=(
        Form(
            "fields",
            (
                key("scale", read.INIT_SCALE, 65536.0),
                key("growth_factor", read.GROWTH_FACTOR, 2.0),
                key("backoff_factor", read.BACKOFF_FACTOR, 0.5),
                key("growth_interval", read.INTERVAL_ONE_LATER, 2000),
                key("minimum_scale", read.FLOOR, 2.0**-126),
                key("fin_steps", read.left_to_the_state("fin_steps"), 0),
            ),
            {"max_scale": UNBOUNDED["max_scale"]},
            ignored=("jit",),
        ),
    ),
    saved=(Saved(scale=("scale",), counters={"growth_tracker": count("fin_steps", equal=True)}),),
    differences=(
        Difference(
            "The scale grows one step later than `growth_interval` says.",
            "`growth_interval` is one more, for the same steps.",
        ),
        Difference(
            "Growth is capped at the largest float32 number, which is no power of two.",
            "The scale stops at 2**126.",
        ),
        Difference("`minimum_scale=None` lets the scale reach 0, and all becomes NaN.", "It stops at 2**-126."),
        Difference(
            "Under `pmap` without `axis_name` the scales of the devices part.",
            "Combine the flags over devices before the update; see the JAX page.",
        ),
    ),
)

_PADDLE_REFILLS = {"refill_on_finite": True, "refill_on_backoff": True}
_PADDLE_DIFFERENCES = (
    Difference(
        "Its documentation says that `decr_every_n_nan_or_inf` counts accumulated overflows. It counts those in a row.",
        "So it is here: `refill_on_finite=True`, `refill_on_backoff=True`.",
    ),
    Difference(
        "Both counts are tested with `==`: below 1 the scale never grows, or never falls.",
        "So it is here, with a warning.",
    ),
)


def _paddle_form(title: str, settings: Settings, ignored: str, *defaults: Any) -> Form:
    scale, grows, falls, up, down = defaults
    keys = (
        key("init_loss_scaling", read.INIT_SCALE, scale),
        key("incr_every_n_steps", read.INTERVAL_EQUAL, grows),
        key("decr_every_n_nan_or_inf", read.HYSTERESIS_EQUAL, falls),
        key("incr_ratio", read.GROWTH_FACTOR, up),
        key("decr_ratio", read.BACKOFF_FACTOR, down),
        key("use_dynamic_loss_scaling", read.DYNAMIC, True, none_is_default=True),
        key("enable", read.ENABLED, True),
    )
    return Form(title, keys, {**_PADDLE_REFILLS, **settings}, tuple(ignored.split()))


PADDLE = Peer(
    name="paddle",
    title="`paddle.amp.GradScaler`",
    version="PaddlePaddle 3.3, eager",
    rule="Doubles on the 2000th finite step in a row, halves on every overflow; no bounds.",
    forms=(
        _paddle_form("constructor or state dict", UNBOUNDED, "scale incr_count decr_count", 2.0**16, 2000, 1, 2.0, 0.5),
    ),
    saved=(
        Saved(
            scale=("scale",),
            counters={"growth_tracker": count("incr_count", equal=True), "hysteresis_tracker": used("decr_count")},
        ),
    ),
    differences=(
        *_PADDLE_DIFFERENCES,
        Difference(
            "No bounds: the scale reaches 0, or infinity and stays there; the static mode has bounds.",
            "It stays between 2**-126 and 2**126.",
        ),
        Difference(
            "It turns itself off for good on a CPU, or where the last `auto_cast` was not float16.",
            "It does what it was told.",
        ),
        Difference("`AmpScaler` starts at 2**15 and grows every 1000 steps.", "Pass these where you used it."),
    ),
)

_STATIC = "optimizer amp_lists use_promote"

PADDLE_STATIC = Peer(
    name="paddle-static",
    title="`paddle.static.amp.decorate`",
    version="PaddlePaddle 3.3, static graphs",
    rule="Doubles on the 2000th finite step in a row, halves on every overflow down to 1.",
    forms=(
        _paddle_form(
            "`decorate`",
            FLOOR_OF_ONE,
            f"{_STATIC} level dtype master_weight master_grad use_amp_guard",
            *(2.0**16, 2000, 1, 2.0, 0.5),
        ),
        _paddle_form(
            "`decorate` of older programs, known by `use_pure_fp16`, `use_fp16_guard` or `use_bf16`",
            FLOOR_OF_ONE,
            f"{_STATIC} use_pure_fp16 use_fp16_guard use_bf16",
            *(2.0**15, 1000, 2, 2.0, 0.8),
        ),
    ),
    saved=(
        Saved(
            scale=("loss_scaling",),
            counters={
                "growth_tracker": count("num_good_steps good_steps", equal=True),
                "hysteresis_tracker": used("num_bad_steps bad_steps"),
            },
        ),
    ),
    differences=(
        *_PADDLE_DIFFERENCES,
        Difference(
            "An overflow *raises* a scale below 1 to 1.",
            "An overflow never raises a scale, so a start below 1 is refused.",
        ),
        _CEILING,
    ),
)

_FIXED_MANAGER = Form(
    "`FixedLossScaleManager`",
    (key("loss_scale", read.FIXED, 128.0),),
    {"kind": "fixed"},
    ignored=("drop_overflow_update",),
    adjust=lambda settings, config: Meaning(
        settings,
        ""
        if config.get("drop_overflow_update", True)
        else "drop_overflow_update=False applies infinite gradients; FixedScaling skips the steps that overflow",
    ),
)
_MINDSPORE_KEYS = (key("scale_factor", read.FACTOR, 2), key("scale_window", read.INTERVAL_MODULO, 2000))

MINDSPORE = Peer(
    name="mindspore",
    title="MindSpore's `DynamicLossScaleManager`",
    version="MindSpore 2.10",
    rule="Doubles on the 2000th finite step in a row, halves on every overflow down to 1.",
    forms=(
        Form(
            "`DynamicLossScaleManager`",
            (key("init_loss_scale init", read.INIT_SCALE, 2.0**24), *_MINDSPORE_KEYS),
            {**FLOOR_OF_ONE, "max_overflow_streak": 1001},
        ),
        Form(
            "`DynamicLossScaleUpdateCell` or `amp.DynamicLossScaler`",
            (key("loss_scale_value scale_value", read.INIT_SCALE, 2.0**24), *_MINDSPORE_KEYS),
            FLOOR_OF_ONE,
        ),
        _FIXED_MANAGER,
    ),
    saved=(
        Saved(
            scale=("loss_scale",),
            counters={
                "growth_tracker": since_overflow("cur_iter", "last_overflow_iter"),
                "overflow_streak": count("bad_step", optional=True),
            },
            title="`vars` of the manager",
        ),
        Saved(
            scale=("scale_sense",),
            counters={"growth_tracker": since_change("current_iterator_step", "last_overflow_iterator_step")},
            title="parameters of `DynamicLossScaleUpdateCell`",
        ),
        Saved(
            scale=("scale_value",),
            counters={"growth_tracker": count("counter", equal=True)},
            title="parameters of `amp.DynamicLossScaler`",
        ),
    ),
    differences=(
        Difference(
            "The manager raises `RuntimeError` on the 1001st overflow in a row.",
            "`max_overflow_streak=1001`: a facade that knows the flag on the host raises `OverflowStreakError`.",
        ),
        Difference(
            "An overflow *raises* a scale below 1 to 1; the constructors refuse such a start.",
            "So it is refused here.",
        ),
        _CEILING,
        Difference(
            "`drop_overflow_update=False` applies infinite gradients.",
            "`FixedScaling` skips them; a warning says so.",
        ),
    ),
)

PEERS = (JMP, FLAX, PADDLE, PADDLE_STATIC, MINDSPORE)
