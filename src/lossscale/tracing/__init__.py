"""The part of `lossscale run` that works in the script's processes: it replaces torch's scalers and records each step.

The import changes nothing, and so does `execute` in a process that `lossscale run` did not prepare.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_VARIABLE = "LOSSSCALE_RUN"
_SITE = Path(__file__).parent / "site"


def environment(policy: dict[str, Any] | None, trace: Path | None) -> dict[str, str]:
    """Return environment variables with which Python processes use this library's scaler instead of torch's.

    Args:
        policy: A policy as a dict; None keeps the settings that the script gives to its scaler.
        trace: The file to write a row per update to; None writes none.
    """
    # Launchers such as torchrun pass on their environment, but neither hooks nor options of the interpreter.
    paths = [str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = {"policy": policy, "trace": None if trace is None else str(trace.absolute())}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), _VARIABLE: json.dumps(run)}


def execute(module: ModuleType, execute_module: Callable[[ModuleType], None]) -> None:
    """Execute a module that has a scaler, and replace that scaler under `lossscale run`.

    A script may import `lossscale_torch` first, which imports torch, or torch first, after which this function imports
    `lossscale_torch`. The scalers are replaced when both are complete.
    """
    run = os.environ.get(_VARIABLE)
    if run is None:
        execute_module(module)
    elif module.__name__ == "torch":
        execute_module(module)
        import lossscale_torch  # noqa: F401
    elif module.__name__ == "lossscale_torch":
        execute_module(module)
        from lossscale.tracing import _replace

        _replace.replace_scalers(**json.loads(run))
    else:
        from lossscale.tracing import _replace

        _replace.replace_sharded_scaler(module, execute_module)
