"""python -m polyreme.distributed.launch [flags] script.py [arguments of the script]."""

import sys

from polyreme.distributed.launch.main import main

if __name__ == "__main__":
    sys.exit(main())
