"""The Runs view: what is selected is acted on, and one refusal does not affect the other runs."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from support.dashboard_pages import Pages, labelled, table_columns
from support.http_server import HttpServer
from support.reporting import evaluation_row, metric_row

from gxpo_client import client
from gxpo_dashboard.labels import plain


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


def test_a_run_that_is_gone_does_not_keep_the_others_out_of_the_archive(pages: Pages) -> None:
    runs = [pages.submit(f"archived {number}") for number in range(3)]
    page = pages.open("runs", {"selection-runs-0": runs})
    pages.cancel(runs[0])
    pages.http.delete(f"/runs/{runs[0]}").raise_for_status()
    labelled(page.button, "Archive").click().run()
    assert [pages.http.get(f"/runs/{run}").json()["archived"] for run in runs[1:]] == [True, True]


def test_a_press_in_the_list_counts_in_a_run_of_the_whole_page(pages: Pages) -> None:
    """As when a refresh of the whole page is due: Streamlit runs it with the press."""
    runs = [pages.submit(f"many {number}") for number in range(51)]
    page = pages.open("runs", text="many")
    for label, shown in (("Next", ["many 0"]), ("Back", [f"many {number}" for number in range(50, 0, -1)])):
        labelled(page.button, label).click().run()
        assert not page.exception
        assert table_columns(page)["name"] == shown
    pages.cancel(runs[-1])
    for label in ("Retry", "Archive"):
        page = pages.open("runs", {"selection-runs-0": runs[-1:]}, text="many")
        labelled(page.button, label).click().run()
        assert not page.exception
    listed = [(run["name"], run["state"]) for run in pages.http.get("/runs?text=many&limit=2").json()["items"]]
    assert listed == [("many 50", "queued"), ("many 49", "queued")], "the retry, and no longer the archived one"


def test_the_curve_of_a_run_has_a_text(pages: Pages) -> None:
    run = pages.submit("with a trend")
    pages.service.report(run, metrics=[metric_row(step, **{"reward/mean": 0.1 * step}) for step in (1, 2, 5)])
    ((_, text),) = table_columns(pages.open("runs", text="with a trend"))["trend"]
    assert text == "Reward 0.100 to 0.500"


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


@pytest.mark.parametrize("status", [200, 403, 404, 429, 500])
def test_a_server_that_is_not_the_service_is_named_until_it_is(
    pages: Pages, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FastAPI()
    other.add_api_route("/{path:path}", lambda: HTMLResponse("<h1>other</h1>", status))
    with HttpServer(other) as url:
        monkeypatch.setenv("GXPO_URL", url)
        page = pages.open("runs")
        assert not page.exception
        assert [title.value for title in page.title] == ["The service is not available"]
        assert [words for words in page.markdown if plain(url) in words.value]
        monkeypatch.undo()
        assert [title.value for title in page.run().title] == ["Runs"]


@pytest.mark.parametrize("token", ["gxpo_é", "“gxpo_abc”", "gxpo_wrong"])
def test_a_token_that_is_none_is_asked_for_again(pages: Pages, token: str) -> None:
    page = pages.open("runs", {"token": ""})
    labelled(page.text_input, "Access token").set_value(token)
    for again in (labelled(page.button, "Sign in").click(), page):
        again.run()
        assert not page.exception
        assert [error.value for error in page.error if "rejected" in error.value] or again is page
    labelled(page.text_input, "Access token").set_value(pages.token)
    labelled(page.button, "Sign in").click().run()
    assert [title.value for title in page.title] == ["Runs"]


def test_a_token_for_metrics_alone_leads_to_the_sign_in(pages: Pages) -> None:
    page = pages.open("runs", {"token": pages.service.token("metrics")})
    assert [title.value for title in page.title] == ["Sign in"]
    words = plain("your token 'metrics' has role metrics, which reads only /metrics")
    assert [error.value for error in page.error] == [words]
    assert "token" not in page.session_state


@pytest.mark.parametrize("view", ["runs", "submit"])
def test_a_token_that_is_revoked_meanwhile_is_said_to_be(pages: Pages, view: str) -> None:
    token = pages.service.token("viewer")
    page = pages.open(view, {"token": token})
    mine = pages.http.get("/tokens/me", headers={"Authorization": f"Bearer {token}"}).json()["id"]
    pages.http.delete(f"/tokens/{mine}").raise_for_status()
    page.run()
    assert [title.value for title in page.title] == ["Sign in"]
    assert [error.value for error in page.error if "unknown, revoked or expired" in error.value]
    assert "token" not in page.session_state


# The Compare view, and Benchmarks, which selects runs in the same way.


def test_more_runs_than_a_view_shows_are_left_out_with_a_message(pages: Pages) -> None:
    runs = [pages.submit(f"run {number}", f"seed={number}") for number in range(10)]
    page = pages.open("benchmarks", runs=runs)
    assert not page.exception
    assert page.query_params["runs"] == runs[:8]
    assert [toast.value for toast in page.toast] == ["Showing the first 8 of 10 runs."]


def test_curves_of_evaluations_have_no_smoothing(pages: Pages) -> None:
    run = pages.submit("evaluated")
    pages.service.finish(run, [0.25, 0.5])
    for view, labels in {"benchmarks": [], "compare": ["Smoothing"]}.items():
        page = pages.open(view, runs=[run])
        assert labelled(page.checkbox, "Hide outliers")
        assert [box.label for box in page.selectbox if box.label == "Smoothing"] == labels


def test_the_sentence_of_a_run_has_no_accuracy_of_another_score(pages: Pages) -> None:
    run = pages.submit("several scores")
    metrics = {"eval/average/pass@1": 0.5, "update/backward_passes_total": 3}
    evaluation = evaluation_row(1, scores={"pass@1": 0.5, "pass@8": 0.75})
    pages.service.report(run, metrics=[metric_row(1, **metrics)], evaluations=[evaluation])
    texts = [pages.open("benchmarks", runs=[run], score=score).info[0].value for score in ("pass@1", "pass@8")]
    accuracy = " 50\\.0% after 3 backward passes\\."
    assert accuracy in texts[0]
    assert texts[1] == texts[0].replace(accuracy, "")


def test_a_run_that_ended_in_its_warm_start_has_no_evaluation_after_it(pages: Pages) -> None:
    run = pages.submit("warm", "warm_start.steps=2", "learner.loss.kl_beta=0")
    pages.service.finish(run, [0.25, 0.5])
    markdown = [words.value for words in pages.open("benchmarks", runs=[run]).markdown]
    assert markdown[-2:] == ["#### No evaluations", "No evaluation after the warm start."]


def test_a_search_of_runs_takes_what_the_service_does(pages: Pages) -> None:
    for view, opening in {"runs": None, "compare": None, "submit": "Search"}.items():
        page = pages.open(view)
        if opening:
            labelled(page.button, opening).click().run()
        (box,) = [box for box in page.text_input if box.label.startswith("Search")]
        assert box.proto.max_chars == 200
        # A browser sends no more than these; blanks around them are no part of what is searched for.
        box.set_value(f" {'x' * 200} ").run()
        assert not page.error
        assert [each for each in page.text_input if each.label == box.label]


def test_an_old_group_is_told_from_newer_ones_of_its_name(pages: Pages) -> None:
    groups = [pages.http.post("/groups", json={"name": "same"}).raise_for_status().json()["id"] for _ in range(201)]
    pages.submit("member", group=groups[0])
    page = pages.open("compare", groups=groups[0])
    for _ in range(2):
        assert not page.exception
        assert labelled(page.multiselect, "Groups").value == [groups[0]]
        assert page.query_params["groups"] in (groups[0], [groups[0]])
        page.run()


def test_what_no_longer_exists_is_said_once(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FRESH_S", 0.0)
    kept, gone = pages.submit("kept"), pages.submit("gone")
    group = pages.http.post("/groups", json={"name": "gone"}).raise_for_status().json()["id"]
    page = pages.open("compare", runs=[kept, gone], groups=group)
    pages.cancel(gone)
    for path in (f"/runs/{gone}", f"/groups/{group}"):
        pages.http.delete(path).raise_for_status()
    words = [caption.value for caption in page.run().caption if "no longer exists" in caption.value]
    assert words == [f"A {kind} in the URL no longer exists." for kind in ("run", "group")]
    assert page.query_params["runs"] in (kept, [kept])
    assert not pages.open("compare", runs="no id").error


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
    bookmark = {"score": "pass@8", "benchmark": "gsm8k"}
    assert bookmark.items() <= dict(pages.open("compare", runs=runs, **bookmark).query_params).items()
    pages.service.finish(runs[0], [0.25, 0.5])
    page = pages.open("compare", runs=runs, baseline=runs[1])
    assert not page.error
    words = plain("earlier is excluded: it has no evaluation (yet)")
    assert f"Using the default baseline, because {words}" in [caption.value for caption in page.caption]
    pages.service.finish(runs[1], [0.25, 0.5])
    assert not [words for words in page.run().markdown if "Nothing to compare yet" in words.value]


def test_a_press_in_the_search_counts_in_a_run_of_the_whole_page(pages: Pages) -> None:
    run = pages.submit("searched")
    page = pages.open("run", run=run)
    for press in ("Search", "This run › Cancel…", "Cancel run", "Search", "Compare"):
        labelled(page.button, press).click().run()
    assert pages.state(run) == "cancelled"
    assert dict(page.query_params) == {"view": "compare"}
