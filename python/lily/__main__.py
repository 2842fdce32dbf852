"""`python -m lily` is the command `lily`."""

import sys

from lily.cli import main

if __name__ == "__main__":
    sys.exit(main())
