"""How hypothesis runs: without a deadline, since machines are shared; in CI with the same examples each time.

A sweep (`tests/sweeping.py`) draws others each time.
"""

import os

from hypothesis import settings

IS_REPEATED = "CI" in os.environ and "LOSSSCALE_SWEEP" not in os.environ

settings.register_profile("lossscale", deadline=None, derandomize=IS_REPEATED)
settings.load_profile("lossscale")
