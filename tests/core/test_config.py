"""Policies as dicts, TOML and JSON: exact round trips, errors with a remedy, a schema that agrees with the loader."""

import json
import os
from pathlib import Path

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lossscale_core import (
    DynamicScaling,
    FixedScaling,
    NoScaling,
    TolerantScaling,
    as_policy,
    dump_policy,
    load_policy,
    policy_from_dict,
    policy_schema,
    policy_to_dict,
    policy_to_toml,
)
from lossscale_core.errors import PolicyError
from lossscale_core.testing import policies

VALIDATOR = jsonschema.Draft202012Validator(policy_schema())


@given(policies())
def test_a_dict_round_trip_is_exact(policy):
    """Every field comes back to the last bit, and the dict is plain."""
    config = policy_to_dict(policy)
    assert policy_from_dict(config) == policy
    assert json.loads(json.dumps(config)) == config


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_file_round_trip_is_exact(tmp_path, suffix):
    """What dump_policy writes, load_policy reads back, equal in every field."""

    @given(policies())
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
    assert policy_from_dict({"kind": "tolerant", "tolerance": 0.1}) == TolerantScaling(tolerance=0.1)


def test_the_config_is_left_alone():
    """Reading a dict twice works: nothing is popped from it."""
    config = {"kind": "fixed", "init_scale": 8.0}
    assert policy_from_dict(config) == policy_from_dict(config) == FixedScaling(8.0)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"kind": "dynamic", "growth_intervall": 3}, ["growth_intervall", "did you mean 'growth_interval'", "known:"]),
        ({"kind": "dynamik"}, ["dynamik", "did you mean 'dynamic'", "tolerant"]),
        ({"kind": 3}, ["kind=3", "known:"]),
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
        ("p.json", '{"kind": "fixed", "init_scale": NaN}', ["p.json", "NaN"]),
        ("p.json", "[]", ["p.json", "table"]),
        ("p.toml", 'kind = "fixed"\ninit_scale = nan', ["p.toml", "init_scale=nan"]),
        ("p.toml", b"\xff\xfe", ["p.toml", "not valid TOML"]),
        ("p.yaml", "kind: dynamic", ["p.yaml", ".toml or .json"]),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, text, words):
    """The message names the file and what is wrong in it."""
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PolicyError) as caught:
        load_policy(path)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_is_an_os_error(tmp_path):
    """A path that does not exist is Python's own error."""
    with pytest.raises(FileNotFoundError):
        as_policy(tmp_path / "none.toml")


def test_dump_keeps_a_file_where_it_may_not_replace_it(tmp_path):
    """With `overwrite=False` it writes what `policy_to_toml` returns to a new file only."""
    path = tmp_path / "p.toml"
    dump_policy(DynamicScaling(), path, overwrite=False)
    with pytest.raises(FileExistsError):
        dump_policy(NoScaling(), path, overwrite=False)
    assert path.read_text() == policy_to_toml(DynamicScaling())


def test_dump_refuses_what_it_cannot_write(tmp_path):
    """Another suffix, or a policy that is not the library's, is refused before anything is written."""

    class Own:
        def init_state(self):
            return DynamicScaling().init_state()

        def update(self, state, grads_finite, *, xp=None):
            return state

    with pytest.raises(PolicyError, match="Own"):
        dump_policy(Own(), tmp_path / "p.toml")
    with pytest.raises(PolicyError, match=r"\.toml or \.json"):
        dump_policy(DynamicScaling(), tmp_path / "p.ini")
    assert os.listdir(tmp_path) == []
    own = Own()
    assert as_policy(own) is own


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


@pytest.mark.parametrize("source", [None, True, "dynamick", "128.0", [], DynamicScaling, b"dynamic"])
def test_as_policy_refuses_the_rest(source):
    """Anything else is answered with the list of what would do."""
    with pytest.raises(PolicyError, match="pass a policy such as"):
        as_policy(source)


def test_as_policy_refuses_scales_out_of_range():
    """A number is a fixed scale and obeys its rule."""
    with pytest.raises(PolicyError, match="init_scale"):
        as_policy(0)


def test_the_schema_is_a_schema():
    """It is valid under its own draft."""
    jsonschema.Draft202012Validator.check_schema(policy_schema())


def _refusal(config):
    try:
        policy_from_dict(config)
    except PolicyError as error:
        return str(error)
    return None


POWERS = st.integers(-130, 130).map(lambda exponent: 2.0**exponent)
VALUES = {
    "init_scale": POWERS | st.just(1024) | st.sampled_from([0, -1.0, "1", None, True]),
    "min_scale": POWERS,
    "max_scale": POWERS,
    "growth_factor": st.floats(0.5, 4.0) | st.sampled_from([1, 2, 1.0 + 2.0**-23, 1.0 + 2.0**-24, 2.0**127, "2"]),
    "backoff_factor": st.floats(-0.5, 1.5) | st.sampled_from([0, 1, 1 - 2.0**-24, 1 - 2.0**-25, False]),
    "growth_interval": st.integers(-2, 3) | st.sampled_from([2.0, 2.5, 2**31 - 1, 2**31, None, True, "3"]),
    "hysteresis": st.integers(-1, 3),
    "cooldown": st.integers(-1, 3) | st.just(0.0),
    "refill_on_finite": st.sampled_from([True, False, 0, 1, None]),
    "refill_on_backoff": st.booleans(),
    "max_overflow_streak": st.sampled_from([None, 0, 1, 7.0, 7.5]),
    "growth_intervall": st.just(3),
}
OTHER_VALUES = st.floats(-0.5, 1.5) | st.integers(-2, 3) | st.booleans() | st.none()
KINDS = policy_schema()["properties"]["kind"]["enum"]
ANY_CONFIG = st.fixed_dictionaries(
    {}, optional={"kind": st.sampled_from([*KINDS, "static", 3]), **VALUES, "tolerance": OTHER_VALUES}
)


@st.composite
def nearly_valid_configs(draw):
    """Draw a valid config with powers of two, of which one key may be left out or changed."""
    config = policy_to_dict(draw(policies(powers_of_two=True)))
    change = draw(st.sampled_from(["nothing", "drop", "set"]))
    if change == "drop":
        del config[draw(st.sampled_from(sorted(config)))]
    elif change == "set":
        name = draw(st.sampled_from(sorted({*config, "max_overflow_streak"} - {"kind"})))
        config[name] = draw(VALUES.get(name, OTHER_VALUES))
    return config


def test_the_fuzzed_configs_are_of_both_sorts():
    """The comparison below compares something: many configs load, and many do not."""
    loaded = []

    @given(nearly_valid_configs())
    @settings(max_examples=300, database=None)
    def collect(config):
        loaded.append(_refusal(config) is None)

    collect()
    assert min(sum(loaded), len(loaded) - sum(loaded)) > 0.1 * len(loaded)


UNORDERED = [
    {"kind": "dynamic", "min_scale": 2.0**20},
    {"kind": "dynamic", "min_scale": 70000},
    {"kind": "tolerant", "max_scale": 65535},
    {"kind": "dynamic", "max_scale": 2.0**10},
    {"kind": "tolerant", "min_scale": 2.0**-3, "init_scale": 2.0**-4},
    {"kind": "dynamic", "min_scale": 8.0, "init_scale": 8.0, "max_scale": 7.999},
]


@pytest.mark.parametrize("config", UNORDERED, ids=str)
def test_loading_compares_what_the_schema_cannot(config):
    """Scales out of order satisfy the schema, and no loader."""
    VALIDATOR.validate(config)
    with pytest.raises(PolicyError, match="must not exceed"):
        policy_from_dict(config)


@given(nearly_valid_configs() | ANY_CONFIG)
@example({"kind": "dynamic", "max_overflow_streak": None})
@example({"kind": "dynamic", "growth_interval": None})
@example({"kind": "fixed"})
@settings(max_examples=500)
def test_the_schema_accepts_what_the_loader_accepts(config):
    """On fuzzed configs the schema and the loader agree, but for the order of the scales."""
    assert VALIDATOR.is_valid(config) == (_refusal(config) is None or "must not exceed" in _refusal(config))


def test_the_schema_is_small():
    """An editor loads a few kilobytes."""
    assert len(json.dumps(policy_schema())) < 8_000


def test_a_written_file_satisfies_the_schema(tmp_path):
    """What dump_policy writes as JSON validates."""
    path = Path(tmp_path) / "p.json"
    for policy in (NoScaling(), FixedScaling(3.0), DynamicScaling(max_overflow_streak=9), TolerantScaling()):
        dump_policy(policy, path)
        VALIDATOR.validate(json.loads(path.read_text()))
