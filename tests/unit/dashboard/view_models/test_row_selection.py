"""A selection stays with its items while rows move."""

from __future__ import annotations

from gxpo_dashboard.view_models.tables import RowSelection


def test_the_selection_follows_items_to_their_new_rows() -> None:
    selection = RowSelection()
    assert selection.place(["a", "b", "c"]) == []
    selection.report([2, 0])
    assert selection.place(["a", "b", "c"]) == [0, 2]
    assert selection.place(["new", "c", "a", "b"]) == [1, 2]
    selection.report([1, 2])
    assert selection.place(["c", "b"]) == [0]


def test_a_report_of_the_order_before_selects_no_other_items() -> None:
    selection = RowSelection()
    selection.place(["a", "b"])
    selection.report([0])
    assert selection.place(["a", "b"]) == [0]
    assert selection.place(["new", "a", "b"]) == [1]
    # Sent before the browser had drawn the order with `new`, and again.
    for _ in range(2):
        selection.report([0])
        assert selection.place(["new", "a", "b"]) == [1]
    selection.report([1])
    assert selection.place(["new", "a", "b"]) == [1]
    # Since the browser has confirmed the order, row 0 is `new`.
    selection.report([0])
    assert selection.place(["new", "a", "b"]) == [0]


def test_what_the_visitor_changes_is_of_the_order_shown() -> None:
    selection = RowSelection()
    selection.place(["a", "b"])
    selection.report([0])
    selection.place(["new", "a", "b"])
    selection.report([1, 2])
    assert selection.place(["b", "a", "new"]) == [0, 1]
    selection.report([])
    assert selection.place(["a", "b", "new"]) == []
