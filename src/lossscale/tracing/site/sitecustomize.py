"""Watch for the import of torch in every Python process below `lossscale run`, which puts this folder on PYTHONPATH.

The `site` module imports `sitecustomize` when Python starts. Only the standard library is imported before torch is.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_WATCHED = ("torch", "lossscale_torch", "torch.distributed.fsdp.sharded_grad_scaler")


class _ScalerFinder:
    """A finder of the modules that have a scaler; they are executed by `lossscale.tracing`."""

    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:  # type: ignore[no-untyped-def]
        if name not in _WATCHED:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            execute_module = spec.loader.exec_module

            def execute(module):  # type: ignore[no-untyped-def]
                from lossscale import tracing

                tracing.execute(module, execute_module)

            # The loader stays of its type, which `inspect` and `importlib.resources` rely on.
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def _import_hidden_module() -> None:
    """Import the `sitecustomize` that this one hides, such as a distribution's or a virtual environment's."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]
    spec = PathFinder.find_spec(__name__, sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules[__name__] = module_from_spec(spec)
        spec.loader.exec_module(module)


# First in the list, since a finder before it would load torch without this one.
sys.meta_path.insert(0, _ScalerFinder())
_import_hidden_module()
