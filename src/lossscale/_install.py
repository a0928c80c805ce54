"""The advice how to install an extra."""


def how_to_install(extra: str) -> str:
    """Return the commands that install an extra from a package index and in a clone of the repository."""
    return f"run: pip install 'lossscale[{extra}]', or in a clone: pip install '.[{extra}]'"
