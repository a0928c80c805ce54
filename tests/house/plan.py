"""The import plan: which module of each package imports which other ones; `test_imports.py` checks it.

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
