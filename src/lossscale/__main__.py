"""The entry point of the `lossscale` command, which names the `demo` extra if it is not installed."""

import sys

_DEMO_EXTRA = {"click", "matplotlib", "rich", "sklearn", "threadpoolctl"}


def main() -> None:
    """Run the `lossscale` command on `sys.argv`.

    Raises:
        SystemExit: The command is done; the status is 2, after a message on stderr, for invalid input.
    """
    try:
        from lossscale.cli import run

        run()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _DEMO_EXTRA:
            raise
        print(
            f"lossscale: this command needs {error.name}, which is not installed; run: pip install 'lossscale[demo]'",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
