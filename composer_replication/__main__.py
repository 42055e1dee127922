"""The command ``composer-replication``, also as ``python -m composer_replication``."""

import sys

from composer_replication.util.lazy import MissingExtraError, named_extra


def main() -> None:
    """Run the command, or say which extra it needs."""
    try:
        from composer_replication.cli import main as run
    except ModuleNotFoundError as error:
        named = named_extra("The command composer-replication", error)
        if not isinstance(named, MissingExtraError):
            raise
        print(f"Error: {named}", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
