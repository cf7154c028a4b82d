"""The benchmark: `onepass bench`, `plot`, `report`, `compare`, `profile`, `info`. How it measures: `docs/benchmark.md`.

- `cases.py`: what is timed, as data; `random_cases.py`, `score_cases.py`: cases made from the options
- `providers.py`: what is compared; `registry.py`: the registry of providers
- `correctness.py`: the tensors, and the check before the clock; `timing.py`: the clocks, medians, disturbed times
- `runner.py`: cases in, rows out; `results.py`, `collect_env.py`: their file
- `report.py`, `random_report.py`: the tables and sentences of a run; `progress.py`: its progress display
- `cli_run.py`: one run from its options to its files
- `plots.py`: files in, plots out; `html_report.py`, `page/`: files in, one interactive page out
- `styles.py`: what plots and the page share
- `compare.py`: two files in, regressions and gains out; `profile.py`: torch.profiler
"""
