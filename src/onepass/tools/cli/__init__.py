"""The command line: one file per command or per few commands.

The commands that need the library and torch load them (`params.Command`), so that `--help`, `gallery` and `compare`
answer at once. A user's error is one line, with exit status 2.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from onepass.tools.cli.bench import bench, compare, info, plot, profile, report
from onepass.tools.cli.explain import explain
from onepass.tools.cli.gallery import gallery
from onepass.tools.cli.traffic import traffic
from onepass.tools.cli.tune import tune
from onepass.tools.cli.warmup import warmup
from onepass.version import __version__


class Commands(click.Group):
    """A group whose errors are one line: those of click take three, with the usage first."""

    def main(self, *args: Any, **options: Any) -> NoReturn:
        options["standalone_mode"] = False
        try:
            status = super().main(*args, **options)
            sys.stdout.flush()
        except click.ClickException as error:
            click.echo(f"onepass: {' '.join(error.format_message().split())}", err=True)
            sys.exit(2)
        except (click.Abort, KeyboardInterrupt):
            click.echo("onepass: stopped", err=True)
            sys.exit(130)
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # as in `onepass info | head -1`
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, help="Show the version and exit.")
@click.pass_context
def cli(context: click.Context, version: bool) -> None:
    """The softmax family for PyTorch at the speed of memory."""
    if version:
        click.echo(f"onepass {__version__}")
    elif context.invoked_subcommand is None:
        click.echo(context.get_help())
    if version:
        context.exit()


for _command in (bench, plot, report, compare, gallery, traffic, profile, warmup, info, explain, tune):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    cli.main(args=None if arguments is None else list(arguments), prog_name="onepass")
