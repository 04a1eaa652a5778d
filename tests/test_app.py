"""What holds for every route: who may come in, from where, and what is logged of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from local_app import app_of, call, local_state, make_ready
from scripted_server import error_of

from xllm_cli.server.app import create_routers
from xllm_cli.server.entrance import Entrance
from xllm_cli.server.guard import OPEN_PATHS
from xllm_cli.server.keys import ApiKeys
from xllm_cli.server.state import ServerState

KEY = {"authorization": "Bearer right"}


@pytest.fixture
def state(tmp_path: Path) -> Iterator[ServerState]:
    with local_state(tmp_path) as made:
        yield made


def paths(state: ServerState) -> list[tuple[str, str]]:
    """Method and path of every route, made concrete, and of the framework's own."""
    routes = [route for router in create_routers(state, ApiKeys()) for route in router.routes]
    assert all(isinstance(route, APIRoute) for route in routes)
    found = [(method, route.path) for route in routes if isinstance(route, APIRoute) for method in route.methods or ()]
    return [("GET", "/openapi.json"), *((method, path.replace("{name:path}", "x")) for method, path in found)]


def test_every_route_is_a_probe_or_needs_a_key(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    with local_state(folders[0]) as state, local_state(folders[1]) as other:
        app, found = app_of(state, "right", "other"), paths(other)
        assert len(found) > 30
        for method, path in found:
            assert (call(app, path, method).status_code == 401) == (path not in OPEN_PATHS), path
            assert call(app, path, method, headers=KEY).status_code not in (401, 403, 405), path
    assert {"/health", "/livez", "/readyz", "/ping", "/version", "/v2/health/live", "/v2/health/ready"} == OPEN_PATHS


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401), ({"authorization": "Bearer wrong"}, 401), ({"authorization": "Bearer "}, 401),
        ({"authorization": "Basic right"}, 401), ({"authorization": "right"}, 401), ({"x-api-key": "rightx"}, 401),
        ({"authorization": "bearer right"}, 200), ({"authorization": "Bearer second"}, 200),
        ({"x-api-key": "right"}, 200),
    ],
)  # fmt: skip
def test_keys(state: ServerState, headers: dict[str, str], status: int) -> None:
    app = app_of(state, "right", "second")
    answer = call(app, "/v1/models", headers=headers)
    assert answer.status_code == status
    assert status == 200 or (answer.headers["www-authenticate"], error_of(answer)["type"]) == (
        "Bearer", "authentication_error",
    )  # fmt: skip
    assert call(app, "/no/such/route").status_code == 401 and call(app, "/health//").status_code == 503


def test_metrics_are_open_only_by_flag(tmp_path: Path) -> None:
    for is_public, status in ((False, 401), (True, 200)):
        folder = tmp_path / str(is_public)
        folder.mkdir()
        with local_state(folder) as state:
            assert call(app_of(state, "key", public_metrics=is_public), "/metrics/").status_code == status


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1", None, 400), ("::1", None, 400), ("::ffff:127.0.0.1", None, 400), ("10.0.0.7", None, 403),
        ("127.0.0.1", "http://localhost:8010", 400), ("127.0.0.1", "https://evil.example", 403),
        ("127.0.0.1", "null", 403), ("127.0.0.1", "http://[bad", 403),
    ],
)  # fmt: skip
def test_admin_routes_answer_on_loopback_or_with_a_key(
    state: ServerState, host: str, origin: str | None, status: int
) -> None:
    headers = {} if origin is None else {"origin": origin}
    answer = call(app_of(state), "/sleep", "POST", host=host, headers=headers)
    assert answer.status_code == status
    assert error_of(answer)["code"] == ("vmm_weights_required" if status == 400 else "loopback_only")


def test_every_route_that_changes_the_server_is_guarded(state: ServerState) -> None:
    app = app_of(state)
    paths = call(app, "/openapi.json").json()["paths"]
    closed = {path for path in paths if call(app, path, "POST", host="10.0.0.7", json={}).status_code == 403}
    orders = {"sleep", "wakeup", "wake_up", "fork_master", "update_weights", "pause", "resume", "vmm/limit", "vmm/trim"}
    assert closed == {f"/{order}" for order in orders}
    assert [path for path, verbs in paths.items() if "delete" in verbs] == ["/v1/models/{name}"]
    assert call(app, "/v1/models/x", "DELETE", host="10.0.0.7").status_code == 403
    assert call(app, "/v1/models/x", "DELETE").status_code == 503  # it is loading


def test_a_key_opens_admin_routes_from_afar(state: ServerState) -> None:
    assert call(app_of(state, "right"), "/sleep", "POST", host="10.0.0.7", headers=KEY).status_code == 400


def test_browsers_of_allowed_origins_may_ask_without_a_key(state: ServerState) -> None:
    app = app_of(state, "right", allowed_origins="https://a.example, https://b.example/")
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for origin, status in (("https://a.example", 200), ("https://b.example", 200), ("https://c.example", 400)):
        answer = call(app, "/v1/chat/completions", "OPTIONS", headers={"origin": origin, **asking})
        assert answer.status_code == status
        assert answer.headers.get("access-control-allow-origin") == (origin if status == 200 else None)
    refused = call(app, "/v1/models", headers={"origin": "https://a.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"


def test_cors_is_off_by_default(state: ServerState) -> None:
    app = app_of(state)
    headers = {"origin": "https://a.example", "access-control-request-method": "GET"}
    assert call(app, "/v1/models", "OPTIONS", headers=headers).status_code == 405
    assert "access-control-allow-origin" not in call(app, "/v1/models", headers=headers).headers


@pytest.mark.parametrize(("lines", "expected"), [("requests", 2), ("all", 8), ("off", 0)])
def test_the_access_log_leaves_out_probes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lines: Any, expected: int
) -> None:
    with local_state(tmp_path, access_log=lines) as state, caplog.at_level(logging.INFO, "xllm_cli"):
        app = app_of(state)
        for path in ("/health", "/livez", "/readyz", "/ping", "/metrics", "/v2/health/live"):
            call(app, path)
        call(app, "/v1/models", headers={"x-request-id": "mine"})
        call(app, "/no%0Asuch%20route", "POST")
    assert len(caplog.messages) == expected
    if lines == "requests":
        assert "127.0.0.1 GET /v1/models 200 " in caplog.messages[0] and caplog.messages[0].endswith(" mine")
        assert r"POST /no\nsuch route 404 " in caplog.messages[1]


def test_requests_are_counted_by_route(state: ServerState) -> None:
    app = app_of(state)
    for path in ("/v1/models", "/v1/models/tiny", "/v1/models/other", "/random", "/wp-login.php"):
        call(app, path)
    call(app, "/v1/completions", "POST")
    text = call(app, "/metrics").text
    assert 'http_requests_total{handler="/v1/models/{name:path}",method="GET",status="4xx"} 1.0' in text
    assert 'http_requests_total{handler="none",method="GET",status="4xx"} 2.0' in text
    assert 'http_request_duration_seconds_count{handler="/v1/completions"} 1.0' in text
    assert "wp-login" not in text


def test_liveness_ends_with_a_long_silence(state: ServerState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_of(state)
    assert (call(app, "/livez").status_code, call(app, "/health").status_code) == (200, 503)
    make_ready(state, tmp_path)
    assert (call(app, "/livez").status_code, call(app, "/health").status_code) == (200, 200)
    monkeypatch.setattr(type(state.client), "silent_seconds", lambda client: 121.0)
    assert call(app, "/livez").json() == {"status": "unhealthy", "silent_seconds": 121.0}
    assert call(app, "/v2/health/live").json() == {"live": False}


def test_probes_are_answered_before_the_routes_are_there(state: ServerState) -> None:
    entrance = Entrance(state)
    health = call(entrance, "/health").json()
    assert 0 <= health.pop("seconds") < 60 and health == {"status": "loading", "phase": "starting"}
    assert call(entrance, "/livez").status_code == 200
    entrance.open(app_of(state))
    assert call(entrance, "/v1/models").status_code == 200


def test_draining_takes_requests_until_it_is_closed(state: ServerState, tmp_path: Path) -> None:
    make_ready(state, tmp_path)
    app, state.draining = app_of(state), True
    body = {"prompt": "hi"}
    assert call(app, "/health").status_code == 503
    assert call(app, "/v1/completions/render", "POST", json=body).status_code == 200
    state.is_closed = True
    assert error_of(call(app, "/v1/completions/render", "POST", json=body))["code"] == "shutting_down"


def test_strict_servers_refuse_unknown_fields(tmp_path: Path) -> None:
    with local_state(tmp_path, strict_requests=True) as state:
        make_ready(state, tmp_path)
        answer = call(app_of(state), "/v1/completions", "POST", json={"prompt": "x", "temperatur": 1, "user": "me"})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "temperatur")


def test_a_failure_of_ours_is_a_500_without_details(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerState, "health", lambda self: 1 / 0)
    answer = call(app_of(state), "/health")
    assert (answer.status_code, error_of(answer)["code"]) == (500, "internal_error")
    assert "division" not in answer.text
