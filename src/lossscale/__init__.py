"""The `lossscale` command and its demo; the library itself is `lossscale_core` and an adapter for each framework.

Nothing imports this package: it is what a person runs, as `lossscale` or `python -m lossscale`.
"""

from lossscale_core import __version__

__all__ = ["__version__"]
