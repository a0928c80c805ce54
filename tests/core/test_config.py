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
from tests.core.own_policies import AdditiveScaling, BareAdditiveScaling
from tests.strategies import LIBRARY_KINDS, policies

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
        assert load_policy(path) == as_policy(str(path)) == policy

    round_trip()


def test_as_policy():
    """Everything a facade takes as `policy=`; None means the default of a setting that may be None."""
    policy = DynamicScaling(hysteresis=2)
    assert as_policy(policy) is policy
    for source in ("dynamic", {"kind": "dynamic"}, {"kind": "dynamic", "max_overflow_streak": None}):
        assert as_policy(source) == DynamicScaling()
    sources = ("none", 1024, 0.5, {"kind": "fixed", "init_scale": 2})
    assert [*map(as_policy, sources)] == [NoScaling(), *map(FixedScaling, (1024.0, 0.5, 2.0))]


FROM_TOOL = "for the config of another tool run: lossscale policy convert FILE, or call lossscale.from_tool"
BAD_CONFIGS = [
    ({"kind": "dynamic", "growth_intervall": 3}, "growth_intervall' .* did you mean 'growth_interval'.* known:"),
    ({"kind": "dynamik"}, "dynamik.* did you mean 'dynamic'.* fixed"),
    ({"kind": ["dynamic"]}, "kind=.* known:"),
    ({"kind": "fixed"}, "a 'fixed' policy needs init_scale; add it, as in init_scale = 1024.0"),
    ({"kind": "none", "init_scale": 1.0}, "'init_scale' is not a key of a 'none' policy"),
    ([1], "table.* kind = 'dynamic'"),
    ({"growth_interval": 3}, r"no 'kind', but growth_interval; add kind = 'dynamic' \(known: none, fixed, dynamic"),
    ({"train_batch_size": 8, "fp16": {"enabled": True}}, f"no 'kind'.* {re.escape(FROM_TOOL)}"),
    ({"kind": "dynamic", "loss_scale_window": 1000}, re.escape(FROM_TOOL)),
    ({}, "no 'kind', but nothing; add kind = 'dynamic'"),
    ({"tool": {"lossscale": {"kind": "dynamic"}}}, "no 'kind', but tool; add kind = 'dynamic' .* outside of any table"),
]


@pytest.mark.parametrize(("config", "words"), BAD_CONFIGS)
def test_a_bad_config_names_the_remedy(tmp_path, config, words):
    """A dict and a file get the same sentence; the file's begins with its path."""
    with pytest.raises(PolicyError, match=words):
        policy_from_dict(config)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(PolicyError, match=f"^{re.escape(str(path))}: .*{words}"):
        load_policy(path)


def test_dump_refuses_what_it_cannot_write(tmp_path):
    """Another suffix, a policy that is not the library's, or a file that may not be replaced, before it writes."""
    with pytest.raises(PolicyError, match="BareAdditiveScaling"):
        dump_policy(BareAdditiveScaling(), tmp_path / "p.toml")
    with pytest.raises(PolicyError, match=r"\.toml or \.json"):
        dump_policy(DynamicScaling(), tmp_path / "p.ini")
    assert list(tmp_path.iterdir()) == []
    dump_policy(DynamicScaling(), tmp_path / "p.toml", overwrite=False)
    with pytest.raises(FileExistsError):
        dump_policy(NoScaling(), tmp_path / "p.toml", overwrite=False)
    assert load_policy(tmp_path / "p.toml") == DynamicScaling()
