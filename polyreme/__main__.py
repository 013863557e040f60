"""`python -m polyreme`: the polyreme command."""

import sys

from polyreme.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
