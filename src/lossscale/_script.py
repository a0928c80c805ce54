"""The execution of a script or module in this process, as `python SCRIPT` or `python -m MODULE` would execute it."""

import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from lossscale_core.errors import LossScaleError


def execute(program: list[str], *, is_module: bool) -> None:
    """Execute a program as `__main__`, with the same exit status and output as without this library.

    The module of the program stays `sys.modules["__main__"]` after its end, where exit functions, threads and child
    processes of the program look for its classes. `runpy.run_path` would restore the module of the command.

    Args:
        program: The path of the script, or the name of the module, and the arguments.
        is_module: Whether the first element is the name of a module.

    Raises:
        SystemExit: From the program, for a syntax error (status 1) and for a module that does not exist (status 2).
        OSError: The script cannot be read.
    """
    sys.argv[:] = program
    main, code = _module(program[0]) if is_module else _script(program[0])
    sys.modules["__main__"] = main
    try:
        exec(code, vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        frames = error.__traceback__ and error.__traceback__.tb_next  # without the frame of this function
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        # The interpreter then ends the process without a second traceback; a KeyboardInterrupt ends it by its signal.
        sys.excepthook = lambda *_: None
        raise


def _script(path: str) -> tuple[ModuleType, CodeType]:
    """Return the module and the code of a script, and set `sys.path` as `python SCRIPT` does."""
    full, main = os.path.abspath(path), ModuleType("__main__")
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    vars(main).update(__file__=full, __builtins__=sys.modules["builtins"], __annotations__={}, __cached__=None)
    main.__loader__ = SourceFileLoader("__main__", full)
    try:
        with open(full, "rb") as file:
            return main, compile(file.read(), full, "exec", dont_inherit=True)
    except SyntaxError as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        sys.exit(1)


def _module(name: str) -> tuple[ModuleType, CodeType]:
    """Return the module and the code of a module, and set `sys.path` and `sys.argv` as `python -m` does."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    sys.argv[0] = "-m"  # during the import of its parent packages
    find: Any = runpy._get_module_details  # type: ignore[attr-defined]  # as `python -m` and pdb do
    try:
        _, spec, code = find(name, LossScaleError)
    except LossScaleError as error:
        print(f"lossscale: -m {name}: {error}; pass a module, or a package with __main__", file=sys.stderr)
        sys.exit(2)
    main = ModuleType("__main__")
    vars(main).update(__file__=spec.origin, __builtins__=sys.modules["builtins"], __cached__=spec.cached)
    main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
    sys.argv[0] = spec.origin
    return main, code
