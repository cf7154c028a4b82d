"""`python -m onepass` is `onepass`."""

from onepass.tools.cli import main

if __name__ == "__main__":
    main()
