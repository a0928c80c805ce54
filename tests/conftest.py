"""How hypothesis runs everywhere: without a deadline, since machines are shared, and in CI the same way every time."""

import os

from hypothesis import settings

settings.register_profile("lossscale", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("lossscale")
