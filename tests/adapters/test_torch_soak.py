"""A run with killed processes continues from its checkpoint like a run without kills."""

from benchmarks.soak_torch import soak


def test_two_processes_that_are_killed():
    """Overflows, spikes and a kill: every number of the last checkpoint is that of a run without kills."""
    figures = soak(processes=2, steps=60, kills=1, seed=0)
    assert figures.overflows > 3
    assert figures.spikes > 0
    assert figures.skipped >= figures.spikes
    assert figures.kills == 1
    assert figures.differences == 0
