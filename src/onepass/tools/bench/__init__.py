"""The benchmark: `onepass bench` and `onepass plot`. `docs/benchmark.md` says what is measured and how.

- `cases.py`, `suites.py`: what is timed, as data; `work.py`: its tensors
- `providers.py`: who is raced, a registry; `entrants.py`: those that come with the package
- `check.py`: right before fast; `timing.py`: the clocks; `stats.py`: medians
- `run.py`: cases in, rows out; `results.py`: the file they go to; `environment.py`: what it was made with
- `disturbed.py`: which rows were timed while something else had the machine
- `table.py`: rows as text; `report.py`: what is shown while it goes; `command.py`: one run, from choices to files
- `plot.py`, `figures.py`: files in, pictures out; `compare.py`: two files in, regressions and gains out
- `rungs.py`: the gallery's rungs as providers; `profile.py`, `profiler.py`, `profile_table.py`: `onepass profile`
"""
