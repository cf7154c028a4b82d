"""temporary"""


def overlap(a, b):
    if a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride():
        return "same"
    return "none"


def self_overlap(t):
    return any(s == 0 and n > 1 for n, s in zip(t.shape, t.stride()))
