"""The demo's effect is real: float16 needs loss scaling once the loss is small, and the dynamic policy provides it."""

import json

import matplotlib.image
import pytest

from lossscale.demo import DEFAULT_POLICY, regimes, train
from lossscale_core import DynamicScaling, dump_policy
from tests.command.commanding import refused, run, succeed
from tests.sweeping import seeds


def _train(name, weight=1e-5, seed=0, steps=300):
    dtype, policy = regimes(DEFAULT_POLICY)[name]
    return train(policy, dtype, weight, seed, steps)


@pytest.mark.parametrize("seed", seeds(3))
def test_dynamic_stays_with_float32_where_unscaled_float16_collapses(seed):
    """At the default weight: within a point of float32's accuracy, and unscaled at least ten points below."""
    exact, unscaled, dynamic = (
        _train(name, seed=seed) for name in ("float32", "float16, no scaling", "float16, dynamic")
    )
    assert exact.accuracy > 0.97
    assert abs(dynamic.accuracy - exact.accuracy) <= 0.01
    assert unscaled.accuracy <= exact.accuracy - 0.10
    assert unscaled.flushed > 0.5
    assert dynamic.flushed < 0.01
    assert exact.flushed == 0.0


def test_the_demo_does_not_overstate_its_case():
    """Without a small weight float16 trains without scaling too; a fixed scale serves one weight and not the next."""
    assert _train("float16, no scaling", 1.0).accuracy > 0.97
    assert _train("float16, fixed 64").accuracy > 0.97
    assert _train("float16, fixed 64", 1e-6).accuracy < 0.8
    assert _train("float16, dynamic", 1e-6).accuracy > 0.97


def test_the_command_leaves_a_table_pictures_and_a_trace(tmp_path):
    """The trace is one that `simulate` reads: the same policy has the same scales."""
    policy = DynamicScaling(init_scale=2.0**44, growth_interval=4, max_scale=2.0**48)
    dump_policy(policy, tmp_path / "policy.toml")
    table, said = succeed("demo", "--steps", 20, "--policy", "policy.toml", "--out", "out/deep", cwd=tmp_path)
    rows = [line.split("  ")[0] for line in table.splitlines()]
    assert rows == ["regime", "float32", "float16, no scaling", "float16, fixed 64", "float16, your policy"]
    assert all(len(line) <= 80 for line in table.splitlines())
    assert "next: change the policy, and run: lossscale simulate out/deep/policy.toml out/deep/trace.csv" in said
    found = json.loads(succeed("simulate", "policy.toml", "out/deep/trace.csv", "--json", cwd=tmp_path)[0])
    assert found["final_loss_scale"] == train(policy, "float16", 1e-5, 0, 20).final_scale
    assert found["skipped_steps"] > 0
    wide, narrow = (matplotlib.image.imread(tmp_path / f"out/deep/demo{name}.png") for name in ("", "-narrow"))
    assert wide.shape[1] > 2 * wide.shape[0]
    assert narrow.shape[0] > 2 * narrow.shape[1]
    assert narrow.shape[1] <= 720
    assert wide[0, 0, 3] == 0.0  # transparent, for dark pages
    assert wide[:40].max() > 0.0  # the title is above the panels


def test_the_demo_refuses_a_folder_with_results_before_it_trains(tmp_path):
    """It leaves what is there alone."""
    (tmp_path / "trace.csv").write_text("mine")
    assert "trace.csv exists and is not overwritten" in refused(run("demo", "--out", ".", cwd=tmp_path))
    assert (tmp_path / "trace.csv").read_text() == "mine"


def test_the_demo_leaves_its_own_policy_file_as_it_is(tmp_path):
    """A policy file with comments that lies in the demo's folder keeps them, also with --overwrite."""
    text = '# mine\nkind = "dynamic"\n'
    (tmp_path / "policy.toml").write_text(text)
    succeed("demo", "--policy", "policy.toml", "--out", ".", "--steps", 2, "--overwrite", cwd=tmp_path)
    assert (tmp_path / "policy.toml").read_text() == text
    assert (tmp_path / "trace.csv").exists()
