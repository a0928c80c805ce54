"""`python -m lossscale` and the `lossscale` command, which names the `demo` extra where that is not installed."""

import sys

_DEMO_EXTRA = {"click", "matplotlib", "rich", "sklearn", "threadpoolctl"}


def main() -> None:
    """Run the `lossscale` command on `sys.argv`; exits with status 2 and one sentence on bad input."""
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
