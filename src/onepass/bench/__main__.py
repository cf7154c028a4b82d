"""`python -m onepass.bench` is `onepass bench`."""

import sys

from onepass.cli import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
