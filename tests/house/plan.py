"""Plans of the packages: which module imports which other ones (`test_imports.py`), and which tests are its own.

A line names modules and those that each of them imports, at its top or, in brackets, within a function. A module is
below all that it imports at its top. A subpackage counts as one module, and has a plan of its own.
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
        errors _messages _tree:
        _gradient_range: _messages
        _settings: errors _messages
        _files: errors _messages
        _state: _settings _messages
        _arrays: _state _messages _tree
        _base: _arrays _settings _state errors
        _guard: _arrays _settings _state errors _messages
        _policy: _arrays _base _settings _state _messages
        _config: _arrays _base _policy _settings _state errors _files _messages
        _checkpoint: _base _config _guard _policy _settings _state errors _messages
        _report: _base _config _guard _settings _state errors _messages
        _step: _arrays _base _guard _state
        testing: _base _config _guard _messages _settings _state _step
        adapters: _checkpoint _config _files _guard _messages _report _settings _state _step _tree
        __init__: _arrays _base _checkpoint _config _gradient_range _guard _policy _report _state adapters
            errors testing
    """,
    "lossscale_core.testing": """
        _simulation loops:
        _check: _simulation
        __init__: _check _simulation
    """,
    "lossscale_torch": """
        _gradients _step_info _versions:
        _ranks _snapshots: _gradients
        _state: _gradients _step_info
        _checkpoint: _state _versions
        _placement: _checkpoint _gradients _state _step_info
        _verbs: _gradients _ranks
        _optimizers: _gradients _state _versions
        _attach: _gradients _versions
        hooks: _gradients _optimizers _ranks _snapshots _state _step_info _versions
        _clip: _gradients _optimizers _state
        _report: _gradients _verbs
        _range: _attach _gradients _snapshots _verbs
        _float32: _gradients _range
        _skip_log: _gradients _report _state _step_info hooks
        _attempts: _gradients _snapshots _state _step_info _versions
        _scaler: _attach _attempts _checkpoint _clip _gradients _optimizers _placement _state _step_info _versions hooks
        _guarded: _clip _gradients _optimizers _ranks _scaler _skip_log _state _step_info _versions hooks
        __init__: _float32 _guarded _range _report _scaler _step_info _verbs hooks
        testing: _gradients _scaler _step_info hooks
    """,
    "lossscale_jax": """
        _gradients:
        _verbs _states testing: _gradients
        _optimizer: _gradients _states _verbs
        __init__: _optimizer _states _verbs
    """,
    "lossscale_tf": """
        _documented _pairs _state _verbs _warning:
        _report: _verbs
        keras: _documented _pairs _verbs _warning
        v1: _documented _pairs _verbs _warning
        __init__: _report _state _verbs keras v1
    """,
    "lossscale_tf.keras": """
        _marks _inner:
        _arguments _names _saving _slots: _inner
        _optimizer: _arguments _inner _marks _names _saving _slots
        __init__: _optimizer
    """,
    "lossscale_tf.v1": """
        _foreign _step:
        _optimizer: _foreign _step
        __init__: _optimizer
    """,
    "lossscale_keras": """
        _backend:
        _losses: _backend
        _verbs: _backend
        _report: _verbs
        _step: _backend _verbs
        _replicas: _backend _step
        _optimizer: _backend _losses _replicas _step _verbs
        _logger: _optimizer
        __init__: _logger _optimizer _report _verbs
    """,
    "lossscale": """
        _recording: cli
        _script _versions demo other_tools:
        __init__: other_tools
        __main__: _versions (cli)
        cli: _versions demo other_tools (_recording) (_script)
    """,
    "lossscale.cli": """
        _shared:
        _trace: _shared
        _pictures: _trace
        checkpoint policy run: _shared
        demo plot: _shared _trace (_pictures)
        simulate: _shared _trace
        __init__: _shared checkpoint demo plot policy run simulate
    """,
}

TESTS = {
    "lossscale_core": """
        _policy _state: core/policy_rule core/tolerant_policy core/policy_settings core/testing
        _base: core/own_policies core/check_policy core/mistakes
        _arrays _tree: core/verbs core/all_finite core/mistakes
        _settings: core/policy_settings core/config core/mistakes
        _config: core/config core/mistakes core/own_policies
        _checkpoint: core/checkpoint core/mistakes core/own_policies core/guard
        _files: core/config command/files
        _messages errors: core/mistakes core/policy_settings core/config core/report
        _gradient_range: core/gradient_range core/mistakes
        _guard: core/guard core/mistakes
        _report: core/report core/watch core/guard core/mistakes
        _step: core/conformance core/guard conformance/guards_across_frameworks
        adapters __init__: core/import core/mistakes core/loops
        *: core/verbs core/policy_rule core/checkpoint core/config core/report core/conformance core/check_policy
    """,
    "lossscale_core.testing": """
        _check: core/check_policy core/own_policies
        _simulation: core/testing core/mistakes
        loops: core/loops adapters/jax_check_step
        __init__: core/testing
        *: core/guard
    """,
    "lossscale_torch": """
        _gradients: adapters/torch_clipping adapters/torch_odd_gradients adapters/torch_devices adapters/torch_norms
        _step_info: adapters/torch_scaler adapters/torch_hooks
        _versions: adapters/torch_versions adapters/torch_scaler
        _ranks: adapters/torch_distributed adapters/torch_distributed_edges adapters/torch_norms
        _snapshots: adapters/torch_attempts adapters/torch_hooks adapters/torch_transactions
        _state _placement: adapters/torch_states adapters/torch_scaler adapters/torch_synchronisation
            adapters/torch_loops
        _checkpoint: adapters/torch_scaler adapters/torch_broken_files adapters/torch_other_tools
            adapters/torch_messages
        _verbs: conformance/backends@torch conformance/wrong_arguments@torch adapters/torch_odd_gradients
        _optimizers: adapters/torch_odd_optimizers adapters/torch_states adapters/torch_transactions
            adapters/torch_loops
        hooks: adapters/torch_hooks adapters/torch_guard adapters/torch_transactions adapters/torch_watch
        _attach: adapters/torch_attach adapters/torch_penalty
        _clip: adapters/torch_clipping adapters/torch_norms adapters/torch_fuzz
        _report: adapters/torch_reports adapters/torch_messages
        _range: adapters/torch_reports adapters/torch_float32 adapters/torch_messages
        _float32: adapters/torch_float32 adapters/torch_messages
        _skip_log: adapters/torch_guarded adapters/torch_messages
        _attempts: adapters/torch_attempts adapters/torch_transactions adapters/torch_messages
        _scaler: adapters/torch_scaler adapters/torch_transactions adapters/torch_loops adapters/torch_messages
            adapters/torch_differences adapters/torch_fuzz
        _guarded: adapters/torch_guarded adapters/torch_messages
        testing: adapters/torch_check_loop adapters/torch_pages adapters/torch_messages
        __init__: adapters/torch_scaler
        *: adapters/torch_distributed adapters/torch_graphs adapters/torch_other_packages
    """,
    "lossscale_jax": """
        _gradients _verbs: adapters/jax_verbs adapters/jax_mistakes adapters/jax_optimizer conformance/backends@jax
        _optimizer: adapters/jax_optimizer adapters/jax_guard adapters/jax_select adapters/jax_mistakes
            adapters/jax_bits adapters/jax_programs
        _states: adapters/jax_optimizer adapters/jax_mistakes adapters/jax_distributed
        testing: adapters/jax_check_step adapters/jax_batch_norm adapters/jax_mistakes
        __init__: adapters/jax_verbs
        *: adapters/jax_distributed adapters/jax_other_tools adapters/jax_around
    """,
    "lossscale_keras": """
        _backend _step _optimizer: adapters/keras_steps adapters/keras_last_loss adapters/keras_fit
            adapters/keras_saving
        _losses: adapters/keras_last_loss adapters/keras_steps
        _replicas: adapters/tensorflow_fit adapters/keras_fit
        _report _verbs: adapters/keras_steps conformance/backends@keras
        _logger: adapters/keras_fit adapters/tensorflow_logger
        __init__: adapters/keras_steps
        *: adapters/tensorflow_keras
    """,
    "lossscale_tf": """
        _documented: adapters/tensorflow_promises_keras adapters/tensorflow_promises_v1
            adapters/tensorflow_other_tools
        _pairs _warning: adapters/tensorflow_mistakes adapters/tensorflow_promises_keras
            adapters/tensorflow_promises_v1
        _state _verbs: adapters/tensorflow_verbs conformance/backends@tensorflow
        _report: adapters/tensorflow_mistakes adapters/tensorflow_verbs
        __init__: adapters/tensorflow_imports
        *: adapters/tensorflow_watch
    """,
    "lossscale_tf.keras": """
        _marks: adapters/tensorflow_last_loss adapters/tensorflow_promises_keras
        _inner _slots _names: adapters/tensorflow_promises_keras adapters/tensorflow_keras
        _arguments: adapters/tensorflow_mistakes adapters/tensorflow_promises_keras
        _saving: adapters/tensorflow_saving adapters/tensorflow_promises_keras
        _optimizer: adapters/tensorflow_keras adapters/tensorflow_promises_keras adapters/tensorflow_last_loss
            adapters/tensorflow_fit
        __init__: adapters/tensorflow_promises_keras
        *: adapters/tensorflow_watch
    """,
    "lossscale_tf.v1": """
        _foreign _step _optimizer __init__: adapters/tensorflow_promises_v1 adapters/tensorflow_mistakes
            adapters/tensorflow_other_tools
        *: adapters/tensorflow_last_loss
    """,
    "lossscale": """
        _recording _script: adapters/torch_run
        _versions __main__: command/running
        demo: command/demo
        other_tools __init__: command/other_tools command/hostile_files adapters/torch_other_tools
        *: command/command
    """,
    "lossscale.cli": """
        __init__ _shared policy simulate: command/command command/files command/hostile_files
        _trace plot _pictures: command/command command/demo command/hostile_files
        checkpoint: command/command command/hostile_files adapters/torch_hostile_files
        demo: command/demo command/command
        run: adapters/torch_run
        *: command/command_page command/running
    """,
}
"""The test files of each module, below `tests` and without `test_`; `@` limits a file to the tests that name a word.

`nox -s mutants` runs them on the mutants of a module, then those of its package's others and of `*`.
"""


def own_tests(package):
    """Return the test files of each module of a package in `TESTS`."""
    rows = [line.split(":") for line in TESTS[package].replace("\n            ", " ").strip().splitlines()]
    return {module: files.split() for modules, files in rows for module in modules.split()}
