"""The test files of each module, which `nox -s mutants` runs first on the mutants of the module."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TEST_FILES = {
    "lossscale": "command/",
    "lossscale_core": "core/",
    "lossscale_torch": "adapters/torch_",
    "lossscale_jax": "adapters/jax_",
    "lossscale_tf": "adapters/tensorflow_",
    "lossscale_keras": "adapters/keras_",
}
"""The start of the names of a package's test files, below `tests` and without `test_`."""

TESTS = {
    "lossscale_core": """
        _policy: policy_rule tolerant_policy policy_settings testing conformance mistakes
        _state: policy_rule conformance mistakes import adapters/jax_mistakes@not_there_yet
        _base: own_policies check_policy mistakes
        _arrays _tree: verbs all_finite mistakes conformance
        _settings: policy_settings config mistakes
        files: config command/files command/hostile_files command/command
        _messages errors: mistakes policy_settings config report
        _step: conformance guard conformance/guards_across_frameworks
        adapters __init__: import mistakes testing
        _reports _diagnosis _outcome: report runs
        *: watch
    """,
    "lossscale_core.testing": """
        _check: check_policy own_policies
        _simulation: testing mistakes guard command/command
        loops: testing adapters/jax_check_step
        __init__: testing
    """,
    "lossscale_torch": """
        _gradients: clipping odd_gradients devices norms messages
        _step_info _versions: scaler hooks attach
        hooks _snapshots: hooks guard attempts transactions distributed norms
        _record _state: states scaler synchronisation loops transactions odd_optimizers
        _checkpoint: scaler broken_files other_tools messages
        _verbs: conformance/backends@torch conformance/wrong_arguments@torch odd_gradients
        _clip: clipping norms fuzz guard transactions
        _scaler: scaler transactions loops messages differences fuzz odd_optimizers
        _watch: watch loops transactions messages
        _report testing: reports check_loop pages messages
        __init__: scaler
        *: graphs other_packages
    """,
    "lossscale_torch._extras": """
        _attach _attempts _guarded: attach attempts guarded guarded_checkpoints guard transactions messages
        _range_report _float32_plan: reports float32 messages
        __init__: scaler
    """,
    "lossscale_jax": """
        _gradients: verbs finite mistakes optimizer conformance/backends@jax distributed@forgotten
        _states: recipes optimizer mistakes distributed check_step@split_modules
        testing: check_step mistakes
        __init__: verbs
        *: guard bits programs recipes other_tools around
    """,
    "lossscale_keras": """
        _backend _stored: steps last_loss adapters/tensorflow_last_loss adapters/tensorflow_fit
        _step: steps last_loss saving adapters/tensorflow_fit adapters/tensorflow_promises_keras@promise_052
        forwarding: steps adapters/tensorflow_promises_keras
        tensorflow: adapters/tensorflow_last_loss adapters/tensorflow_fit adapters/tensorflow_verbs
        tensorflow: adapters/tensorflow_promises_v1
        _optimizer: steps last_loss saving adapters/tensorflow_fit
        _losses: adapters/tensorflow_last_loss last_loss steps
        _report _verbs: steps conformance/backends@keras
        _logger: fit adapters/tensorflow_watch
        __init__: steps
        *: adapters/tensorflow_keras
    """,
    "lossscale_tf": """
        _policies: mistakes promises_keras promises_v1 other_tools
        _wrappers: last_loss mistakes promises_keras promises_v1
        _report: mistakes verbs
        __init__: imports
        *: watch conformance/backends@tensorflow
    """,
    "lossscale_tf.keras": """
        _inner: promises_keras keras adapters/keras_saving
        _slots: promises_keras keras
        _optimizer: keras promises_keras last_loss mistakes fit
        __init__: promises_keras
    """,
    "lossscale_tf.v1": """
        _step __init__: promises_v1 mistakes other_tools
        _optimizer: promises_v1 mistakes saving other_tools
        *: conformance/checkpoints_across_frameworks@compat
    """,
    "lossscale": """
        _recording _script: adapters/torch_run
        _versions __main__: running
        __init__: other_tools hostile_files adapters/torch_other_tools
        *: command
    """,
    "lossscale.cli": """
        __init__ _shared policy simulate: command files hostile_files
        _trace plot _pictures: command demo hostile_files
        checkpoint: command hostile_files adapters/torch_hostile_files
        run: adapters/torch_run
        *: command_page
    """,
}
"""The test files of each module, if they are not the file of its name, such as `test_guard.py` for `_guard`.

A row has the ends of the names of files, or names with a folder for files of other packages. `@` limits a file to the
tests that contain a word. `*` has the other files of the package, which run last.
"""


def own_tests(package):
    """Return the test files of each module of a package, below `tests` and without `test_`."""
    start = TEST_FILES[package.partition(".")[0]]
    rows = [line.split(":") for line in TESTS[package].strip().splitlines()]
    named = {module: files.split() for modules, files in rows for module in modules.split()}
    modules = [path.stem for path in (ROOT / "src" / package.replace(".", "/")).glob("*.py")]
    listed = {module: [module.strip("_")] for module in modules} | named
    return {module: [file if "/" in file else start + file for file in files] for module, files in listed.items()}
