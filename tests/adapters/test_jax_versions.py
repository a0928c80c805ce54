"""The installed versions are ones that `lossscale report` calls tried."""

import importlib.metadata

import pytest

from lossscale._tried import untried


@pytest.mark.parametrize("package", ["jax", "optax", "flax"])
def test_this_version_was_tried(package):
    """Else a newer release is to be tried, and then to be named in `lossscale/_tried.py`."""
    assert untried(package, importlib.metadata.version(package)) is None
