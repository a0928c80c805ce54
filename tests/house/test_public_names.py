"""Public names: `__all__` is explicit and complete, and each name is documented."""

import inspect
from types import ModuleType
from typing import Literal, get_origin

import pytest

import lossscale_core
from lossscale import other_tools
from lossscale_core import errors, testing


def test_all_lists_the_public_names():
    """`__all__` of the core lists each public attribute."""
    public = {name for name in dir(lossscale_core) if not name.startswith("_") or name == "__version__"}
    assert public == set(lossscale_core.__all__)


@pytest.mark.parametrize("module", [lossscale_core, testing, errors, other_tools], ids=lambda module: module.__name__)
def test_every_public_object_is_documented(module):
    """Each public function, class and method of the core has a docstring."""
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    for name in names:
        value = getattr(module, name)
        if isinstance(value, ModuleType) or not callable(value) or get_origin(value) is Literal:
            continue  # the doc of a type alias stands below it, where only the reference finds it
        own_doc = value.__doc__ or ""
        assert own_doc, name
        assert not own_doc.startswith(f"{name}("), f"{name} has only the docstring a dataclass makes"
        for method_name, method in vars(value).items() if inspect.isclass(value) else ():
            if inspect.isfunction(method) and not method_name.startswith("_"):
                assert method.__doc__, f"{name}.{method_name}"


def test_public_classes_name_their_package():
    """A pickle of a policy or state names the public package, not a private module that may be renamed."""
    for name in lossscale_core.__all__:
        value = getattr(lossscale_core, name)
        if inspect.isclass(value):
            assert value.__module__ == "lossscale_core", name
