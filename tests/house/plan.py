"""Plans of the packages: the layers of their modules (`test_imports.py`), and which tests are a module's own.

A subpackage counts as one module, and has a plan of its own. What a function imports when it is called does not count.
"""

ADAPTERS = {
    "lossscale_torch": {"torch", "numpy"},
    "lossscale_jax": {"jax", "optax"},
    "lossscale_tf": {"tensorflow", "keras", "tf_keras", "numpy", "lossscale_keras"},
    "lossscale_keras": {"keras", "jax", "torch", "tensorflow", "numpy"},
}
"""The packages that each adapter imports in addition to the core."""

PLAN = {
    "lossscale_core": """
        _messages _tree errors
        _files _gradient_range _settings
        _state
        _arrays _base
        _guard _policy
        _config _step
        _checkpoint _report testing
        adapters
        __init__
    """,
    "lossscale_core.testing": """
        _simulation loops
        _check
        __init__
    """,
    "lossscale_torch": """
        _gradients _step_info _versions
        _attach _ranks _snapshots _state
        _attempts _checkpoint _optimizers _verbs
        _clip _placement _range _report hooks
        _float32 _skip_log _watch
        _scaler
        _guarded testing
        __init__
    """,
    "lossscale_jax": """
        _gradients
        _states _verbs testing
        _optimizer
        __init__
    """,
    "lossscale_tf": """
        _documented _state _verbs
        _marks _report
        keras v1
        __init__
    """,
    "lossscale_tf.keras": """
        _inner
        _arguments _names _saving _slots
        _optimizer
        __init__
    """,
    "lossscale_tf.v1": """
        _step
        _optimizer
        __init__
    """,
    "lossscale_keras": """
        _backend
        _losses _verbs
        _report _step
        _replicas
        _optimizer
        _logger
        __init__
    """,
    "lossscale": """
        _script _versions demo other_tools
        __init__ __main__ cli
        _recording
    """,
    "lossscale.cli": """
        _shared
        _trace checkpoint policy run
        _pictures demo plot simulate
        __init__
    """,
}
"""The layers of each package, the lowest first: the modules of a line import those of earlier lines alone."""

TEST_FILES = {
    "lossscale": "command/",
    "lossscale_core": "core/",
    "lossscale_torch": "adapters/torch_",
    "lossscale_jax": "adapters/jax_",
    "lossscale_tf": "adapters/tensorflow_",
    "lossscale_keras": "adapters/keras_",
}
"""How the names of a package's test files begin, below `tests` and without `test_`."""

TESTS = {
    "lossscale_core": """
        _policy: policy_rule tolerant_policy policy_settings testing conformance mistakes
        _state: policy_rule conformance mistakes import adapters/jax_mistakes@not_there_yet
        _base: own_policies check_policy mistakes
        _arrays _tree: verbs all_finite mistakes conformance
        _settings: policy_settings config mistakes
        _config: config mistakes own_policies
        _checkpoint: checkpoint mistakes own_policies guard
        _files: config command/files command/hostile_files
        _messages errors: mistakes policy_settings config report
        _gradient_range: gradient_range mistakes
        _guard: guard mistakes
        _report: report watch guard mistakes
        _step: conformance guard conformance/guards_across_frameworks
        adapters __init__: import mistakes testing
        *: verbs policy_rule checkpoint config report conformance check_policy
    """,
    "lossscale_core.testing": """
        _check: check_policy own_policies
        _simulation: testing mistakes guard
        loops: testing adapters/jax_check_step
        __init__: testing
        *: guard
    """,
    "lossscale_torch": """
        _gradients: clipping odd_gradients devices norms messages
        _step_info: scaler hooks
        _versions: scaler attach
        _ranks: distributed norms
        _snapshots: attempts hooks transactions
        _state _placement: states scaler synchronisation loops transactions
        _checkpoint: scaler broken_files other_tools messages
        _verbs: conformance/backends@torch conformance/wrong_arguments@torch odd_gradients
        _optimizers: odd_optimizers states transactions loops differences
        hooks: hooks guard transactions
        _watch: watch loops transactions messages
        _attach: attach reports messages
        _clip: clipping norms fuzz guard transactions
        _report: reports messages
        _range: reports float32 messages
        _float32: float32 messages
        _skip_log: guarded messages
        _attempts: attempts transactions messages
        _scaler: scaler transactions loops messages differences fuzz
        _guarded: guarded guard messages
        testing: check_loop pages messages
        __init__: scaler
        *: distributed graphs other_packages
    """,
    "lossscale_jax": """
        _gradients _verbs: verbs mistakes optimizer conformance/backends@jax distributed@forgotten
        _optimizer: optimizer guard mistakes bits programs
        _states: optimizer mistakes distributed check_step@split_modules
        testing: check_step mistakes
        __init__: verbs
        *: distributed other_tools around
    """,
    "lossscale_keras": """
        _backend: steps last_loss adapters/tensorflow_last_loss adapters/tensorflow_fit
        _step: steps last_loss saving adapters/tensorflow_fit adapters/tensorflow_promises_keras@promise_052
        _optimizer: steps last_loss saving adapters/tensorflow_fit
        _losses: adapters/tensorflow_last_loss last_loss steps
        _replicas: adapters/tensorflow_last_loss adapters/tensorflow_fit last_loss
        _report _verbs: steps conformance/backends@keras
        _logger: fit adapters/tensorflow_watch
        __init__: steps
        *: adapters/tensorflow_keras
    """,
    "lossscale_tf": """
        _documented: mistakes promises_keras promises_v1 other_tools
        _marks: last_loss promises_keras promises_v1
        _state: mistakes promises_keras promises_v1 verbs
        _verbs: verbs keras promises_v1 conformance/backends@tensorflow
        _report: mistakes verbs
        __init__: imports
        *: watch
    """,
    "lossscale_tf.keras": """
        _inner _slots _names: promises_keras keras
        _arguments: mistakes promises_keras
        _saving: keras promises_keras adapters/keras_saving
        _optimizer: keras promises_keras last_loss mistakes fit
        __init__: promises_keras
        *: watch
    """,
    "lossscale_tf.v1": """
        _step __init__: promises_v1 mistakes other_tools
        _optimizer: promises_v1 mistakes saving other_tools
        *: last_loss conformance/checkpoints_across_frameworks@compat
    """,
    "lossscale": """
        _recording _script: adapters/torch_run
        _versions __main__: running
        demo: demo
        other_tools __init__: other_tools hostile_files adapters/torch_other_tools
        *: command
    """,
    "lossscale.cli": """
        __init__ _shared policy simulate: command files hostile_files
        _trace plot _pictures: command demo hostile_files
        checkpoint: command hostile_files adapters/torch_hostile_files
        demo: demo command
        run: adapters/torch_run
        *: command_page running
    """,
}
"""The test files of each module, by the rest of their names, or from the folder on where they are another package's.

`@` limits a file to the tests that name a word. `nox -s mutants` runs them on the mutants of a module, then those of
its package's others and of `*`.
"""


def own_tests(package):
    """Return the test files of each module of a package in `TESTS`, below `tests` and without `test_`."""
    rows = [line.split(":") for line in TESTS[package].replace("\n            ", " ").strip().splitlines()]
    start = TEST_FILES[package.partition(".")[0]]
    named = {modules: [each if "/" in each else start + each for each in files.split()] for modules, files in rows}
    return {module: files for modules, files in named.items() for module in modules.split()}
