"""`python -m termrsi`: the same entry point as the `termrsi` command."""

import sys

from termrsi.driver import main

if __name__ == "__main__":
    sys.exit(main())
