"""`python -m onepass` is `onepass`."""

from onepass.cli import main

if __name__ == "__main__":
    main()
