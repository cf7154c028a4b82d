"""Benchmarks, tuning, the gallery and the command line. They import the library; the library imports none of them."""
