"""``python -m scaledot`` is the command ``scaledot``."""

from scaledot.cli import main

if __name__ == "__main__":
    main()
