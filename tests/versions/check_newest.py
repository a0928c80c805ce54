"""Require that installed releases are the newest that `lossscale report` calls tried: `nox -s newest` runs this."""

import importlib.metadata
import sys

from lossscale._tried import TRIED

for distribution in sys.argv[1:]:
    name = distribution.removesuffix("-cpu")
    installed, newest = importlib.metadata.version(distribution), TRIED[name][1]
    if not f"{installed}.".startswith(f"{newest}."):
        sys.exit(
            f"{name} {installed} is installed, and {newest} is the newest that was tried; if the tests pass, "
            "write its version in src/lossscale/_tried.py and docs/works-with.md"
        )
