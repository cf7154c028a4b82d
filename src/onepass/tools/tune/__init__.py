"""Measures which plan serves which length of rows and columns fastest on the GPU at hand, for the CUDA engine to use.

candidates  what may be the fastest for a length        measure  checks and times it on a GPU
columns     the same for calls over other dims
table       from times to table entries                 run      a whole sweep, which can be broken off and taken up
store       the file of tables, and its place           journal  what a sweep that was broken off had measured
load        gives the file to the engine                compile  compiles in several processes
"""
