"""The records of all tools by name; each tool is a module that ends in its `TOOLS` and is listed in `_MODULES`."""

from typing import Any

from lossscale.dialects import _apex, _deepspeed, _jax, _keras, _megatron, _paddle, _torch
from lossscale.dialects._record import Tool
from lossscale_core.adapters import nearest_name, shown

# Static imports, so that tools such as PyInstaller find the modules. Of tools that save the same names, the first is
# guessed.
_MODULES: tuple[Any, ...] = (_torch, _apex, _deepspeed, _megatron, _keras, _jax, _paddle)
TOOLS: dict[str, Tool] = {tool.name: tool for module in _MODULES for tool in module.TOOLS}
PAGES: dict[str, tuple[Tool, ...]] = {module.__name__.rpartition("._")[2]: module.TOOLS for module in _MODULES}
"""The records of each page in `docs/migrating/`, by the name of the page, which is that of their module."""


def find_tool(name: Any, error: type[Exception]) -> Tool:
    """Return the record of this name. Raises `error` with the nearest known name."""
    if isinstance(name, str) and name in TOOLS:
        return TOOLS[name]
    raise error(f"{shown(name)} is not a known tool; {nearest_name(name, TOOLS)}known: {', '.join(TOOLS)}")
