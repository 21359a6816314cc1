"""``python -m tinkex`` is the ``tinkex`` command."""

import sys


def main() -> None:
    """Runs the command line; a Ctrl-C that comes before it is loaded is one, too."""
    try:
        from tinkex.cli import main as run_and_leave
    except KeyboardInterrupt:
        sys.exit(130)
    run_and_leave()


if __name__ == "__main__":
    main()
