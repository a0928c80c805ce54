"""Policies as dicts, TOML and JSON: exact round trips, errors with a remedy."""

import json
import re

import pytest
from hypothesis import given

import lossscale_core as core
from lossscale_core import DynamicScaling, FixedScaling, NoScaling, as_policy
from lossscale_core.errors import PolicyError
from tests.core.own_policies import AdditiveScaling
from tests.strategies import LIBRARY_KINDS, policies


@given(policies(*LIBRARY_KINDS, AdditiveScaling.kind))
def test_a_round_trip_is_exact(tmp_path_factory, policy):
    """A policy that was written as a dict of plain values, TOML or JSON is read as an equal policy."""
    config = core.policy_to_dict(policy)
    assert core.policy_from_dict(json.loads(json.dumps(config))) == as_policy(config) == policy
    for suffix in (".toml", ".json"):
        path = tmp_path_factory.getbasetemp() / f"policy{suffix}"
        core.dump_policy(policy, path)
        assert core.load_policy(path) == as_policy(str(path)) == policy


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
        core.load_policy(path)


def test_a_file_is_replaced_if_allowed(tmp_path):
    """`dump_policy(..., overwrite=False)` raises `FileExistsError` and leaves an existing file as it is."""
    core.dump_policy(DynamicScaling(), tmp_path / "p.toml", overwrite=False)
    with pytest.raises(FileExistsError):
        core.dump_policy(NoScaling(), tmp_path / "p.toml", overwrite=False)
    assert core.load_policy(tmp_path / "p.toml") == DynamicScaling()
