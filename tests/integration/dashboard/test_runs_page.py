"""The Runs view: what is selected is acted on, and one refusal does not affect the other runs."""

from __future__ import annotations

from support.dashboard_pages import Pages, labelled, table_columns


def test_a_run_that_may_not_be_deleted_does_not_keep_the_others(pages: Pages) -> None:
    token = pages.service.token("submitter")
    owners = {"mine": token, "of another": None, "gone": token, "mine too": token}
    runs = {name: pages.submit(name, token=owner) for name, owner in owners.items()}
    for run in runs.values():
        pages.cancel(run)
    page = pages.open("runs", {"selection-runs-0": [*runs.values()], "token": token})
    labelled(page.button, "Delete…").click().run()
    pages.http.delete(f"/runs/{runs['gone']}").raise_for_status()
    labelled(page.button, "Delete 4 runs").click().run()
    assert [pages.state(run) for run in runs.values()] == ["deleted", "cancelled", "deleted", "deleted"]
    refusals = [error.value for error in page.error]
    assert len(refusals) == 1
    assert refusals[0].startswith("of another")
    assert labelled(page.button, "Delete run")


def test_a_baseline_that_does_not_exist_leaves_the_table(pages: Pages) -> None:
    pages.submit("listed")
    page = pages.open("runs", base="r01gone0000000000000")
    assert not page.error
    assert "listed" in table_columns(page)["name"]
    assert [caption.value for caption in page.caption if "does not exist" in caption.value]


def test_a_search_goes_on_through_a_run_of_the_page(pages: Pages) -> None:
    """As when the page changes while words are typed: the run of the page takes the place of that of the search."""
    pages.cancel(run := pages.submit("searched for"))
    page = pages.open("runs")
    labelled(page.button, "Search").click().run()
    page.text_input(key="palette").set_value("searched").run()
    matches = [button for button in page.button if str(button.key).startswith("palette-")]
    assert [match.label for match in matches] == ["searched for · ■ cancelled"]
    matches[0].click().run()
    assert run in page.query_params["run"]
    assert not [button for button in page.button if str(button.key).startswith("palette-")]


def test_the_view_opens_while_the_service_does_not_answer(pages: Pages) -> None:
    page = pages.open("submit")
    pages.service.stop()
    try:
        labelled(page.button, "Runs").click().run()
        assert not page.exception
        assert [caption.value for caption in page.caption if "not responding" in caption.value]
        assert [text.value for text in pages.open("runs").text if "Connection refused" in text.value]
    finally:
        pages.service.start()


# The Compare view, and Benchmarks, which selects runs in the same way.


def test_more_runs_than_a_view_shows_are_left_out_with_a_message(pages: Pages) -> None:
    runs = [pages.submit(f"run {number}", f"seed={number}") for number in range(10)]
    page = pages.open("benchmarks", runs=runs)
    assert not page.exception
    assert page.query_params["runs"] == runs[:8]
    assert [toast.value for toast in page.toast] == ["Showing the first 8 of 10 runs."]


def test_a_single_configuration_is_no_success(pages: Pages) -> None:
    pages.start_comparisons()
    run = pages.submit("alone")
    pages.service.finish(run, [0.25, 0.5])
    page = pages.open("compare", runs=[run])
    assert [info.value for info in page.info if "only configuration" in info.value]
    assert not page.success
    whole = pages.http.get("/compare", params={"runs": run})
    again = pages.http.get("/compare", params={"runs": run}, headers={"If-None-Match": whole.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b""), "a refresh does not send it again"


def test_runs_before_their_first_evaluation_are_no_error(pages: Pages) -> None:
    pages.start_comparisons()
    runs = [pages.submit(name) for name in ("early", "earlier")]
    page = pages.open("compare", runs=runs)
    assert not page.error
    assert [words for words in page.markdown if "Nothing to compare yet" in words.value]
    assert [caption.value for caption in page.caption if caption.value.startswith("Excluded: early:")]
    for run in runs:
        pages.service.finish(run, [0.25, 0.5])
    assert not [words for words in page.run().markdown if "Nothing to compare yet" in words.value]


def test_a_press_in_the_search_counts_in_a_run_of_the_whole_page(pages: Pages) -> None:
    run = pages.submit("searched")
    page = pages.open("run", run=run)
    for press in ("Search", "This run › Cancel…", "Cancel run", "Search", "Compare"):
        labelled(page.button, press).click().run()
    assert pages.state(run) == "cancelled"
    assert dict(page.query_params) == {"view": "compare"}
