"""Run the command line: ``python -m graphglue``."""

from __future__ import annotations

import sys


def main() -> None:
    """Start the command line, or say which extra it needs."""
    try:
        from graphglue.cli import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        print(
            f'the command line needs {missing}, which is not installed: pip install "graphglue[cli]"',
            file=sys.stderr,
        )
        sys.exit(2)
    app(prog_name="graphglue")


if __name__ == "__main__":
    main()
