"""The benchmark: `onepass bench` and `onepass plot`. `docs/benchmark.md` says what is measured and how.

    cases.py        what is timed, as data            providers.py    who is raced: a registry
    work.py         a case's tensors                  check.py        right before fast
    timing.py       the clocks                        run.py          cases -> rows
    results.py      the file: schema 1                environment.py  what it was made with
    table.py        rows as text                      report.py       what is shown while it goes
    plot.py         files -> pictures                 command.py      one run, from choices to files
"""
