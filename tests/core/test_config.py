"""Policies as dicts, TOML and JSON: exact round trips, errors with a remedy."""

import json
import re

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
from lossscale_core.errors import PolicyError
from tests.core.own_policies import AdditiveScaling
from tests.strategies import LIBRARY_KINDS, policies

EACH = policies(*LIBRARY_KINDS, AdditiveScaling.kind)


@given(EACH)
def test_a_dict_round_trip_is_exact(policy):
    """`policy_from_dict` returns the policy that `policy_to_dict` wrote as plain values, equal in every field."""
    config = policy_to_dict(policy)
    assert policy_from_dict(config) == as_policy(config) == policy
    assert json.loads(json.dumps(config)) == policy_to_dict(policy)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_file_round_trip_is_exact(tmp_path, suffix):
    """`load_policy` returns the policy that `dump_policy` wrote, equal in every field."""

    @given(EACH)
    @settings(max_examples=60)
    def round_trip(policy):
        path = tmp_path / f"policy{suffix}"
        dump_policy(policy, path)
        assert load_policy(path) == as_policy(str(path)) == policy

    round_trip()


def test_as_policy_accepts_each_source():
    """`as_policy` accepts a policy, a word, a number and a dict, in which None is a default."""
    policy = DynamicScaling(hysteresis=2)
    assert as_policy(policy) is policy
    for source in ("dynamic", {"kind": "dynamic"}, {"kind": "dynamic", "max_overflow_streak": None}):
        assert as_policy(source) == DynamicScaling()
    sources = ("none", 1024, 0.5, {"kind": "fixed", "init_scale": 2})
    assert [*map(as_policy, sources)] == [NoScaling(), *map(FixedScaling, (1024.0, 0.5, 2.0))]


def test_an_error_names_its_file(tmp_path):
    """`load_policy` and `policy_from_dict` raise the same sentence, to which `load_policy` adds the path."""
    path = tmp_path / "config.json"
    path.write_text('{"kind": "dynamik"}')
    with pytest.raises(PolicyError, match=f"^{re.escape(str(path))}: .*dynamik.* did you mean 'dynamic'"):
        load_policy(path)


def test_a_file_is_replaced_if_allowed(tmp_path):
    """`dump_policy(..., overwrite=False)` raises `FileExistsError` and leaves an existing file as it is."""
    dump_policy(DynamicScaling(), tmp_path / "p.toml", overwrite=False)
    with pytest.raises(FileExistsError):
        dump_policy(NoScaling(), tmp_path / "p.toml", overwrite=False)
    assert load_policy(tmp_path / "p.toml") == DynamicScaling()
