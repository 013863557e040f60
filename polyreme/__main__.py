"""`python -m polyreme`: the polyreme command.

Floor: 8.
"""

import sys

from polyreme.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
