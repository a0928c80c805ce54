"""Likely mistakes with `GradScaler`: the error of each says what was given, the rule and what to do in one sentence."""

import inspect
import re

import pytest
import torch

from lossscale_core import DynamicScaling
from lossscale_core.errors import PolicyError
from lossscale_torch import GradScaler


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"init_scale": float("nan")}, "init_scale=nan must be a number from 2**-126 to 2**126, where"),
        ({"init_scale": 0.0}, "init_scale=0.0 must be a number from"),
        ({"init_scale": "1024"}, "init_scale='1024' must be a number from"),
        ({"init_scale": None}, "init_scale=None must be a number; pass 2.0**16, or a policy as policy="),
        ({"growth_factor": "2"}, "growth_factor='2' must be above 1"),
        ({"backoff_factor": None}, "backoff_factor=None must be between 0 and 1"),
        ({"growth_interval": "2000"}, "growth_interval='2000' must be a whole number"),
    ],
)
def test_a_setting_that_breaks_its_rule_is_named_once(settings, sentence):
    """In one error, which has no other one behind it."""
    with pytest.raises(PolicyError) as caught:
        GradScaler("cpu", **settings)
    message, (name,) = str(caught.value), settings
    assert message.startswith(sentence)
    assert "; pass " in message
    assert message.count(name) == 1
    assert caught.value.__cause__ is caught.value.__context__ is None


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"policy": "none", "init_scale": 1024.0},
            "policy='none' and init_scale=1024.0 are both given; pass either policy= or init_scale, "
            "growth_factor, backoff_factor and growth_interval, as in policy=DynamicScaling(init_scale=1024.0)",
        ),
        (
            {"policy": DynamicScaling(hysteresis=2), "growth_interval": 100, "growth_factor": 4.0},
            "max_overflow_streak=None) and growth_factor=4.0, growth_interval=100 are both given",
        ),
    ],
)
def test_a_policy_and_torchs_settings_are_both_shown(settings, sentence):
    """Both values are in the message, and what to write instead."""
    with pytest.raises(PolicyError, match=re.escape(sentence)):
        GradScaler("cpu", **settings)


def test_a_policy_in_the_place_of_a_setting_goes_to_policy():
    """It is the second argument of many wrappers."""
    with pytest.raises(
        PolicyError, match=r"init_scale=DynamicScaling\(.*\) must be a number; pass 2\.0\*\*16, or a policy as"
    ):
        GradScaler("cpu", DynamicScaling())


@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        (3, "It is 3; pass the loss as a tensor, before .item()"),
        (0.5, "It is 0.5; pass the loss as a tensor"),
        (None, "It is None; pass"),
        ("loss", "It is 'loss'; pass"),
        ([torch.ones(()), 3], "It is 3; pass"),
        ({"loss": 3}, "It is 3; pass"),
    ],
)
def test_a_loss_that_is_not_a_tensor_is_named(outputs, sentence):
    """After torch's own sentence, which programs may look for."""
    with pytest.raises(ValueError, match=re.escape(f"outputs must be a Tensor or an iterable of Tensors. {sentence}")):
        GradScaler("cpu").scale(outputs)


def test_a_misspelt_argument_is_named():
    """With the nearest one and all of them; the signature is that of the class."""
    with pytest.raises(TypeError, match="'grow_interval' is not an argument of GradScaler; did you mean 'growth_inter"):
        GradScaler("cpu", grow_interval=3)
    assert list(inspect.signature(GradScaler).parameters)[:2] == ["device", "init_scale"]
