"""Layouts: the one of contiguous rows is the one that is made for any tensor."""

from lib.cpp import build, output


def test_the_layout_of_contiguous_rows_is_the_one_that_is_made_for_any(tmp_path):
    layouts = output(build(tmp_path, "layouts", options=()))
    assert layouts == str(4 * sum(4**rank for rank in range(1, 6)))
