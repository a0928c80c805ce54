"""The `lossscale` command and its demo. The library itself is `lossscale_core` with an adapter for each framework.

The command runs as `lossscale` or as `python -m lossscale`; no other package imports this one.
"""

from lossscale_core import __version__

__all__ = ["__version__"]
