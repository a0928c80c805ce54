"""The entry point of the `lossscale` command. If a subcommand needs an extra that is missing, the error names it."""

import sys

from lossscale._versions import versions

_EXTRAS = {"click": "cli", "matplotlib": "plot", "threadpoolctl": "demo", "torch": "torch"}


def main() -> None:
    """Run the `lossscale` command on `sys.argv`.

    `lossscale --version` needs no extra.

    Raises:
        SystemExit: The command has ended. For invalid input the status is 2, and stderr has a message.
    """
    try:
        if sys.argv[1:] == ["--version"]:
            print(versions(), flush=True)
            return
        from lossscale.cli import parse

        execute = parse()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        # Other missing modules are faults of a package, and the traceback shows where.
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
    execute()  # outside of `try`, because a script may raise the same errors


if __name__ == "__main__":
    main()
