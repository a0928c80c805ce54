"""The entry point of the `lossscale` command, which names the extra that a subcommand needs if it is not installed."""

import sys

from lossscale._versions import versions

_EXTRAS = {"click": "cli", "matplotlib": "plot", "threadpoolctl": "demo", "torch": "torch"}


def main() -> None:
    """Run the `lossscale` command on `sys.argv`.

    `lossscale --version` needs no extra.

    Raises:
        SystemExit: The command is done; the status is 2, after a message on stderr, for invalid input.
    """
    try:
        if sys.argv[1:] == ["--version"]:
            print(versions(), flush=True)
            return
        from lossscale.cli import parse

        execute = parse()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        # A missing module of any other package is a fault, and its traceback is needed to find it.
        if package not in _EXTRAS:
            raise
        extra = _EXTRAS[package]
        print(
            f"lossscale: this command needs {package}, which is not installed; run: pip install 'lossscale[{extra}]', "
            f"or in a clone: pip install '.[{extra}]'",
            file=sys.stderr,
        )
        sys.exit(2)
    except OSError as error:
        print(f"lossscale: stdout: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    execute()  # outside, since a script has errors of its own


if __name__ == "__main__":
    main()
