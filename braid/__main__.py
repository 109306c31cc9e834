"""``python -m braid`` is the ``braid`` command, also where only the package was shipped."""

from braid.jobs.cli import main

if __name__ == "__main__":
    main()
