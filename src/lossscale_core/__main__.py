"""Print that the command has moved from `python -m lossscale_core` to the package `lossscale`."""

import shlex
import sys

if __name__ == "__main__":
    moved = shlex.join(["python", "-m", "lossscale", *sys.argv[1:]])
    print(f"lossscale_core: the command has moved to the package lossscale; run: {moved}", file=sys.stderr)
    sys.exit(2)
