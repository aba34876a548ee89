"""A visitor's session: identity, client, live series, and behaviour during outages of the service."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any, NoReturn, cast

import streamlit as st

from gxpo_client.client import Client, ResponseCache, connect, keep
from gxpo_client.errors import NotSignedIn, Refused, ServiceError, ServiceUnavailable
from gxpo_dashboard.labels import TERMINAL, plain
from gxpo_dashboard.session import permalinks
from gxpo_dashboard.session.link import cookie_name, may_use_local_token, read_secret, sessions
from gxpo_dashboard.view_models.forms import all_paths
from gxpo_dashboard.view_models.rules import Rules, rules_of
from gxpo_dashboard.view_models.series import MAX_POINTS, LiveSeries, refresh

Json = dict[str, Any]

RETRY_S = 3.0
_PROBE_S = 5.0
"""Time-out of the check whether the service responds."""
LIVE_S = 2.0
SLOW_S = 5.0
_CATALOGUE_S = 300.0
_MAX_SERIES = 64
_MAX_DRAWN = 2400
"""Points of a chart of several runs, shared by them: the browser redraws all points at every refresh."""
_FEWEST_DRAWN = 60
"""Minimum points per run."""


def service_url(*, external: bool = False) -> str:
    """URL of the API; `external`: for the visitor's own commands, without a slash at its end."""
    own = os.environ.get("GXPO_URL", "http://127.0.0.1:8000")
    if not external:
        return own
    port = os.environ.get("GXPO_EXTERNAL_PORT")  # where docker-compose.yml publishes the API
    return (os.environ.get("GXPO_EXTERNAL_URL") or (f"http://127.0.0.1:{port}" if port else own)).rstrip("/")


_connection = st.cache_resource(connect)


def client() -> Client:
    """A client with the visitor's token."""
    cache = st.session_state.setdefault("cache", ResponseCache())
    return Client(_connection(service_url()), _token(), cache)


def _token() -> str | None:
    own: str | None = st.session_state.get("token")
    if own or st.session_state.get("signed_out"):
        return own
    headers, address = st.context.headers, st.get_option("server.address")
    host = headers.get("Host")
    local = may_use_local_token(service_url(), address, st.context.ip_address, host, headers.keys())
    if local and sessions.is_open(st.context.cookies.get(cookie_name(host)), time.monotonic()):
        return read_secret(os.environ.get("GXPO_TOKEN_FILE"))
    return None


def enter() -> bool:
    """Whether the visitor is signed in; otherwise shows the sign-in, or that the service is unavailable."""
    if "me" not in st.session_state:
        if _token() is None:
            _sign_in()
            return False
        try:
            st.session_state["me"] = client().send("GET", "/tokens/me", timeout=_PROBE_S)
        except NotSignedIn:
            sign_out()
            _sign_in("The service rejected this token: it is unknown, revoked or expired.")
            return False
        except ServiceError as error:
            if error.status == HTTPStatus.FORBIDDEN and error.detail:  # the service's own words, not a proxy's page
                sign_out()
                _sign_in(plain(error.detail))
                return False
            st.title("The service is not available")
            st.text(str(error))
            st.write(
                f"Its address is {plain(service_url())} (`GXPO_URL`). To start the service and this dashboard on "
                "one machine, run `gxpo up`."
            )
            _watch()
            return False
    _watch()
    return True


def may_change() -> bool:
    """Whether the visitor's role allows changes. The service enforces it; this only disables buttons."""
    return st.session_state.get("me", {}).get("role") in ("submitter", "admin")


def sign_out() -> None:
    """End the session of this tab, and that of the link in all tabs of this browser."""
    sessions.close(st.context.cookies.get(cookie_name(st.context.headers.get("Host"))))
    for key in ("token", "me", "series", "cache", "trends", "dialog"):
        st.session_state.pop(key, None)
    st.session_state["signed_out"] = True


def _enter_again() -> NoReturn:
    """Let `enter` show why the token is rejected."""
    st.session_state.pop("me", None)
    st.rerun()


@contextmanager
def guarded() -> Iterator[None]:
    """Show the service's errors on the page; elements drawn before stay.

    Unavailable without cached data: a caption; the next refresh retries. Token rejected: the sign-in.
    """
    try:
        yield
    except ServiceUnavailable as error:
        refused = error.status == HTTPStatus.SERVICE_UNAVAILABLE  # perhaps this request alone
        st.caption(f"No data: {plain(error)}" if refused else "The service is not responding.")
    except NotSignedIn:
        _enter_again()
    except Refused as error:
        st.error(f"**{plain(error.title)}:** {plain(error.detail)}", icon=":material/error:")
        for field, message in error.errors[:20]:
            st.text(f"{field}: {message}")


@st.cache_resource(ttl=_CATALOGUE_S, max_entries=4, show_spinner=False)
def _rules(url: str, _service: Client) -> Rules:
    schema, _ = catalogue(url, _service)
    return replace(rules_of(schema), settings=tuple(all_paths(schema)))


def rules() -> Rules:
    """The update rules of the service, shared by all visitors; none known while the service does not answer."""
    try:
        return _rules(service_url(), client())
    except ServiceError:
        return Rules()


@st.cache_data(ttl=_CATALOGUE_S, max_entries=4, show_spinner=False)
def catalogue(url: str, _service: Client) -> tuple[Json, list[Json]]:
    """Schema and presets, shared by all visitors."""
    return _service.get("/schema"), cast(list[Any], _service.get("/presets"))


def live_series(run: Json, x: str, names: tuple[str, ...], *, joined: bool = False, whole: bool = False) -> LiveSeries:
    """The series of one run."""
    return live_series_of({run["id"]: run}, x, names, joined=joined, whole=whole)[run["id"]]


def live_series_of(
    runs: Mapping[str, Json],
    x: str,
    names: tuple[str, ...],
    *,
    aligned: bool = False,
    joined: bool = False,
    whole: bool = False,
) -> dict[str, LiveSeries]:
    """This session's series of runs (id → view), refreshed; complete ones of ended runs are not requested again.

    joined: with the same steps for all names, and totals. whole: also what is not visible. Otherwise the service
    smooths them over all steps as the visitor chose. aligned: whether the visible part does not count the steps of warm
    starts. Raises ServiceUnavailable when none has any data.
    """
    # A series has up to twice as many points before it is thinned.
    most = min(MAX_POINTS, max(_FEWEST_DRAWN, _MAX_DRAWN // (2 * max(1, len(runs)))))
    part: Json = {}
    if not whole and (span := permalinks.span(x)) is not None:
        scale = 3600 if x == "time" else 1  # the API has seconds where charts have hours
        before = {view["warm_steps"] for view in runs.values()} if aligned and x == "step" else {0}
        part = {"from": scale * span[0] + min(before), "to": scale * span[1] + max(before)}
    smoothing = 0.0 if whole or joined else permalinks.smoothing()
    part["smoothing"] = smoothing or None
    # One that was fetched before its run ended may lack the last rows.
    ended = {run: view["state"] in TERMINAL for run, view in runs.items()}
    about = (x, names, most, joined, *part.values())
    store: dict[tuple[Any, ...], LiveSeries] = st.session_state.setdefault("series", {})
    series = {}
    for run in runs:
        key = (run, ended[run], *about)
        new = LiveSeries(most, joined=joined, smoothing=smoothing)
        series[run] = keep(store, key, store.get(key, new), _MAX_SERIES)
    due = {run: live for run, live in series.items() if live.revision is None or not ended[run]}
    service, more = client(), {"joined": joined or None, **part}
    try:
        refresh(due, lambda ids, after: service.metrics_of(ids, names, x, after, most, **more))
    except ServiceUnavailable:
        if all(live.revision is None for live in series.values()):
            raise
    return series


LOG_WINDOW = 262_144
"""Bytes of a log that are requested at once."""


def whole_log(service: Client, run: str) -> bytes:
    """The whole log, part by part. A download calls it outside the session, where `client` cannot be called."""
    parts, query = [], {"offset": 0, "limit": LOG_WINDOW}
    # Past the cache: the parts would take the place of all that the session keeps for an outage.
    while (part := service.send("GET", "/runs", run, "logs", params=query, retry=True))["text"]:
        parts.append(part["text"])
        query["offset"] = part["next_offset"]
    return "".join(parts).encode()


@st.fragment(run_every=RETRY_S)
def _watch() -> None:
    """The banner during an outage, and the recovery without a reload."""
    cache: ResponseCache = st.session_state.setdefault("cache", ResponseCache())
    try:
        client().send("GET", "/tokens/me", timeout=_PROBE_S)
    except ServiceUnavailable:
        cache.offline = True
        if "away_since" not in st.session_state and "dialog" not in st.session_state:
            # The banner may be out of view. A toast of a fragment takes the place of an open dialog.
            st.toast("The service is not responding.", icon=":material/cloud_off:", duration="long")
        since = st.session_state.setdefault("away_since", time.time())
        seconds = max(0, round(time.time() - since))
        shown = "You see the last known data. " if "me" in st.session_state else ""
        st.warning(
            f"The service at {plain(service_url())} has not responded for {seconds} s. {shown}Retrying automatically.",
            icon=":material/cloud_off:",
        )
    except NotSignedIn:
        _enter_again()
    except Refused as error:
        st.warning(plain(str(error)))
    else:
        st.session_state.pop("away_since", None)
        if cache.offline or "me" not in st.session_state:
            cache.offline = False
            st.rerun()


def _sign_in(complaint: str = "") -> None:
    st.title("Sign in")
    st.write("Enter an access token. It is kept for this session only.")
    if complaint:
        st.error(complaint, icon=":material/key_off:")
    with st.form("sign-in", width=520):
        token = st.text_input("Access token", type="password", placeholder="gxpo_…", autocomplete="off")
        if st.form_submit_button("Sign in", type="primary") and token.strip():
            st.session_state["token"] = token.strip()
            st.session_state["signed_out"] = False
            st.rerun()
    if "GXPO_LINK_SECRET_FILE" in os.environ:
        st.caption("On this machine you need no token: open the link that `gxpo up` printed.")
    st.caption("An admin creates tokens with `gxpo token create NAME --role viewer`.")
