"""Policies as dicts, TOML and JSON: exact round trips, errors with a remedy."""

import json

import pytest
from hypothesis import given, settings

from lossscale_core import (
    DynamicScaling,
    FixedScaling,
    NoScaling,
    as_policy,
    dump_policy,
    load_policy,
    policy_from_dict,
    policy_to_dict,
)
from lossscale_core._policy import LIBRARY_KINDS
from lossscale_core.errors import PolicyError
from tests.core.own_policies import AdditiveScaling, BareAdditiveScaling
from tests.strategies import policies

EACH = policies(*LIBRARY_KINDS, AdditiveScaling.kind)


@given(EACH)
def test_a_dict_round_trip_is_exact(policy):
    """Every field comes back to the last bit, of a policy of the user's own, too; and the dict is plain."""
    config = policy_to_dict(policy)
    assert policy_from_dict(config) == as_policy(config) == policy
    assert json.loads(json.dumps(config)) == policy_to_dict(policy)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_file_round_trip_is_exact(tmp_path, suffix):
    """What dump_policy writes, load_policy reads back, equal in every field."""

    @given(EACH)
    @settings(max_examples=60)
    def round_trip(policy):
        path = tmp_path / f"policy{suffix}"
        dump_policy(policy, path)
        assert load_policy(path) == policy
        assert as_policy(str(path)) == policy

    round_trip()


def test_defaults_may_be_left_out():
    """Only the kind is required, and None means the default of a setting that may be None."""
    assert policy_from_dict({"kind": "dynamic"}) == DynamicScaling()
    assert policy_from_dict({"kind": "dynamic", "max_overflow_streak": None}) == DynamicScaling()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"kind": "dynamic", "growth_intervall": 3}, ["growth_intervall", "did you mean 'growth_interval'", "known:"]),
        ({"kind": "additive", "incremnt": 2.0}, ["did you mean 'increment'"]),
        ({"kind": "dynamik"}, ["dynamik", "did you mean 'dynamic'", "fixed"]),
        ({"kind": ["dynamic"]}, ["kind=", "known:"]),
        ({"growth_interval": 3}, ["no 'kind'", "kind = 'dynamic'"]),
        ({"kind": "fixed"}, ["init_scale = 1024.0"]),
        ({"kind": "none", "init_scale": 1.0}, ["'init_scale' is not a key of a 'none' policy"]),
        ({"kind": "dynamic", "growth_interval": 0}, ["growth_interval=0", "; pass"]),
        ({"kind": "dynamic", 3: 4}, ["3 is not a key"]),
        ([1], ["table", "kind = 'dynamic'"]),
    ],
)
def test_a_bad_config_names_the_remedy(config, words):
    """The message names what is wrong and what would be right."""
    with pytest.raises(PolicyError) as caught:
        policy_from_dict(config)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.toml", "kind = ", ["p.toml", "not valid TOML"]),
        ("p.json", "{", ["p.json", "not valid JSON"]),
        ("p.json", '{"kind": "fixed", "init_scale": NaN}', ["p.json", "nan"]),
        ("p.toml", 'kind = "fixed"\ninit_scale = nan', ["p.toml", "init_scale=nan"]),
        ("p.toml", '[tool.lossscale]\nkind = "dynamic"', ["in the table 'tool.lossscale'; write them without a table"]),
        ("p.toml", '[[policy]]\nkind = "dynamic"', ["in the table 'policy'; write them without a table"]),
        ("p.toml", 'kind = "dynamic"\nmax_overflow_streak = 0', ["must be left out or a whole", "leave it out"]),
        ("p.json", '{"kind": "dynamic", "refill_on_finite": 1}', ["pass true or false"]),
        ("p.toml", 'kind = "dynamic"\ninit_scale = 0', ["a power of two such as 65536.0"]),
        ("p.toml", 'kind = "dynamic"\nmax_scale = 0', ["a power of two such as 16777216.0"]),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, text, words):
    """The message names the file and what is wrong in it."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(PolicyError) as caught:
        load_policy(path)
    for word in words:
        assert word in str(caught.value)


def test_dump_refuses_what_it_cannot_write(tmp_path):
    """Another suffix, or a policy that is not the library's, is refused before anything is written."""
    with pytest.raises(PolicyError, match="BareAdditiveScaling"):
        dump_policy(BareAdditiveScaling(), tmp_path / "p.toml")
    with pytest.raises(PolicyError, match=r"\.toml or \.json"):
        dump_policy(DynamicScaling(), tmp_path / "p.ini")
    assert list(tmp_path.iterdir()) == []


def test_dump_keeps_a_file_where_it_may_not_replace_it(tmp_path):
    """With `overwrite=False` it writes to a new file only."""
    path = tmp_path / "p.toml"
    dump_policy(DynamicScaling(), path, overwrite=False)
    with pytest.raises(FileExistsError):
        dump_policy(NoScaling(), path, overwrite=False)
    assert load_policy(path) == DynamicScaling()


@pytest.mark.parametrize(
    ("source", "policy"),
    [
        ("dynamic", DynamicScaling()),
        ("none", NoScaling()),
        (1024, FixedScaling(1024.0)),
        (0.5, FixedScaling(0.5)),
        ({"kind": "fixed", "init_scale": 2}, FixedScaling(2.0)),
        (DynamicScaling(hysteresis=2), DynamicScaling(hysteresis=2)),
    ],
)
def test_as_policy(source, policy):
    """Everything a facade takes as `policy=`."""
    assert as_policy(source) == policy
