"""What importing the core brings in, seen from a fresh process."""

import json
import subprocess
import sys

FRAMEWORKS = {"torch", "jax", "jaxlib", "tensorflow", "keras", "cupy", "optax", "flax"}
EXTRAS = {"click", "matplotlib", "sklearn", "hypothesis"}


def _modules_after(statement):
    code = f"import sys, json; {statement}; print(json.dumps(sorted(m.partition('.')[0] for m in sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_importing_the_core_loads_no_framework_and_no_extra():
    """Not even where they are installed: numpy and the standard library are all it takes."""
    loaded = _modules_after("import lossscale_core")
    assert not loaded & (FRAMEWORKS | EXTRAS)


def test_importing_the_core_leaves_out_what_training_does_not_need():
    """Reports, test helpers, other tools' tables and logging are loaded at their first use."""
    late = {"lossscale_core.testing", "lossscale", "logging", "pathlib"}
    code = "import numpy, sys; before = {*sys.modules}; import lossscale_core; print(*({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not late & {*done.stdout.split()}


def test_reading_other_tools_loads_no_framework():
    """Their configs and checkpoints are plain dicts; the table is loaded only by who asks for it."""
    loaded = _modules_after(
        "import lossscale as ls; assert 'lossscale.other_tools' not in sys.modules; "
        "p = ls.from_tool('torch', {}); "
        "ls.state_from_tool('jmp', {'loss_scale': 8.0, 'counter': 1}, p)"
    )
    assert not loaded & (FRAMEWORKS | EXTRAS)


def test_the_torch_adapter_without_torch_says_what_to_install():
    """The error is still a `ModuleNotFoundError` that names torch, and Python's own is its cause."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "try:\n    import lossscale_torch\n"
        "except ModuleNotFoundError as error:\n    print(error, error.name, error.__cause__.name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        'lossscale_torch needs torch, which is not installed; run: pip install "lossscale[torch]" torch torch\n'
    )
