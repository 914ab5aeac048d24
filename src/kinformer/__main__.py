"""``python -m kinformer``: the command line."""

import sys

from kinformer.lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
