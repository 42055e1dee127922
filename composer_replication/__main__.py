"""``python -m composer_replication``: the command, as launchers start it."""

from composer_replication.cli import main

if __name__ == "__main__":
    main()
