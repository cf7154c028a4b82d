"""Measures which plan serves each length of rows and columns fastest on the GPU at hand, for the CUDA engine to use.

sizes       the functions, lengths and shapes that are measured
candidates  the plans that may be the fastest for a length
timing      checks and times them on a GPU
table       makes table entries from the times
run         a whole sweep; onepass/tables.py reads and writes its file
"""
