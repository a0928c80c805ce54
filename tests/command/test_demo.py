"""The demo's effect is real: float16 needs loss scaling once the loss is small, and the dynamic policy provides it."""

import json

import pytest
from matplotlib.figure import Figure

from lossscale.demo import DEFAULT_POLICY, regimes, train
from lossscale_core import DynamicScaling, dump_policy
from tests.command.commanding import refused, run, succeed
from tests.sweeping import seeds


def _train(name, weight=1e-5, seed=0, steps=150):
    dtype, policy = regimes(DEFAULT_POLICY)[name]
    return train(policy, dtype, weight, seed, steps)


@pytest.mark.parametrize("seed", seeds(3))
def test_float16_needs_the_dynamic_scale(seed):
    """At the default weight, dynamic scaling is within a point of float32's accuracy; float16 alone loses ten."""
    exact, unscaled, dynamic = (
        _train(name, seed=seed) for name in ("float32", "float16, no scaling", "float16, dynamic")
    )
    assert exact.accuracy > 0.97
    assert abs(dynamic.accuracy - exact.accuracy) <= 0.01
    assert unscaled.accuracy <= exact.accuracy - 0.10
    assert unscaled.zero > 0.9
    assert abs(dynamic.zero - exact.zero) < 0.1


def test_a_large_weight_needs_no_scale():
    """With a large weight float16 trains without scaling, and a fixed scale fits one small weight but not the next."""
    assert _train("float16, no scaling", 1.0).accuracy > 0.97
    assert _train("float16, fixed 64").accuracy > 0.97
    assert _train("float16, fixed 64", 1e-6).accuracy < 0.8
    assert _train("float16, dynamic", 1e-6).accuracy > 0.97


@pytest.fixture
def figures(monkeypatch):
    """Return the figures that are saved from here on."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure) or save(figure, *args, **kwargs)
    )
    return figures


def test_a_picture_has_the_traces_steps(tmp_path, figures):
    """A picture has a cross at each skipped step, and a panel of the norms if a norm is known and above 0."""
    for known in (0.0, 1.0):
        rows = [f"{step},{8.0 - step / 2},{step == 3},{'' if step < 5 else known}\n" for step in range(10)]
        (tmp_path / "t.csv").write_text("step,scale,overflowed,norm\n" + "".join(rows))
        succeed("plot", "t.csv", "-o", "p.png", "--overwrite", cwd=tmp_path)
    assert [figure.get_figheight() for figure in figures] == [4.0, 6.0]
    without, both = (figure.axes for figure in figures)
    assert len(without) == 1
    scale, norm = both
    assert norm.lines[0].get_xdata().tolist() == [5, 6, 7, 8, 9]
    assert scale.get_xlim() == norm.get_xlim()
    assert (scale.get_yscale(), norm.get_yscale()) == ("log", "log")
    steps, crosses = scale.lines
    assert (steps.get_xdata().tolist(), crosses.get_xydata().tolist()) == ([*range(10)], [[3.0, 6.5]])


def test_the_demo_writes_its_results(tmp_path):
    """The demo prints a table and writes a trace, in which `simulate` finds the scales of the demo's policy."""
    policy = DynamicScaling(init_scale=2.0**44, growth_interval=4, max_scale=2.0**48)
    dump_policy(policy, tmp_path / "policy.toml")
    table, said = succeed("demo", "--steps", 20, "--policy", "policy.toml", "--out", "out/deep", cwd=tmp_path)
    rows = [line.split("  ")[0] for line in table.splitlines()]
    assert rows == ["regime", "float32", "float16, no scaling", "float16, fixed 64", "float16, your policy"]
    assert "next: change the policy, and run: lossscale simulate policy.toml out/deep/trace.csv" in said
    summary = json.loads(succeed("simulate", "policy.toml", "out/deep/trace.csv", "--json", cwd=tmp_path)[0])
    assert summary["final_loss_scale"] == train(policy, "float16", 1e-5, 0, 20).final_scale
    assert summary["skipped_steps"] > 0


def test_the_demo_keeps_existing_results(tmp_path):
    """The demo refuses a folder with results before it trains."""
    (tmp_path / "trace.csv").write_text("mine")
    assert "trace.csv exists and is not overwritten" in refused(run("demo", "--out", ".", cwd=tmp_path))
    assert (tmp_path / "trace.csv").read_text() == "mine"
