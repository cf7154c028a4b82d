"""The console script `onepass`. Where this package is loaded, `import onepass` waits with the library until it is used.

It stands beside the package since Python imports a package before anything in it.
"""

from typing import NoReturn


def main() -> NoReturn:
    from onepass.tools.cli import main as run

    run()
