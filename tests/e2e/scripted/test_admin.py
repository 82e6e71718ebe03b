"""The routes of operators over a scripted engine: whose key opens them, what they refuse, and what they do to open calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from halfbyte.engine.messages import ResetPrefixCache
from halfbyte.entrypoints.openai import admin

Server = Any
USER, ADMIN, BOTH = "user-key", "admin-key", "key-of-both"


@pytest.fixture(scope="module")
def server(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(enable_admin=True, api_keys=(USER, BOTH), admin_api_keys=(ADMIN, BOTH))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def admin_call(server: Server, path: str, method: str = "POST") -> Any:
    return server.http.request(method, path, headers=bearer(ADMIN))


# --- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", admin.ROUTES, ids=lambda route: route.path)
def test_only_the_admin_key_opens_an_admin_route(server: Server, route: admin.Route) -> None:
    """CVE-2025-63389, CVE-2026-92972: a user's key is nobody's here, in whatever way and spelling it comes."""
    before = len(server.model.actions)
    for headers in ({}, bearer(USER), {"x-api-key": USER}, {"x-api-key": ""}, {"authorization": ADMIN}, bearer(ADMIN + "x")):
        for method in ("GET", "POST", "PUT", "DELETE"):
            refused = server.http.request(method, route.path, headers=headers)
            assert refused.status_code == 401 and "admin" in refused.json()["error"]["message"]
            assert refused.headers["www-authenticate"] == "Bearer"
    for spelled in (f"{route.path}/", route.path.upper(), f"{route.path};x", f"/health%2f..{route.path}", f"/.{route.path}%00"):
        assert server.http.request(route.method, spelled, headers=bearer(USER)).status_code == 404
    assert (
        server.http.request(route.method, f"/%{ord(route.path[1]):02x}{route.path[2:]}", headers=bearer(USER)).status_code == 401
    )
    assert len(server.model.actions) == before
    for headers in (bearer(ADMIN), {"x-api-key": ADMIN}, bearer(BOTH)):
        assert server.http.request(route.method, route.path, headers=headers).status_code == 200
    other = {"GET": "POST", "POST": "GET"}[route.method]
    assert server.http.request(other, route.path, headers=bearer(ADMIN)).status_code == 405


def test_the_admin_key_opens_nothing_else(server: Server) -> None:
    for path in ("/v1/models", "/openapi.json", "/nothing"):
        assert server.get(path, headers=bearer(ADMIN)).status_code == 401
        assert server.get(path, headers=bearer(USER)).status_code == server.get(path, headers=bearer(BOTH)).status_code != 401


def test_admin_routes_do_not_exist_unless_they_are_enabled(shared: Server, start_scripted: Callable[..., Server]) -> None:
    keyless = start_scripted(enable_admin=True, admin_api_keys=(ADMIN,))
    for route in admin.ROUTES:
        assert shared.http.request(route.method, route.path).status_code == 404
        assert keyless.http.request(route.method, route.path).status_code == 401
    assert keyless.get("/v1/models").status_code == 200, "users need no key where none is configured"
    assert not set(shared.get("/openapi.json").json()["paths"]) & admin.PATHS
    keyless.stop()


# --- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/reset_prefix_cache?level=1", "query.level"),
        ("/reset_prefix_cache?reset_running_requests=maybe", "query.reset_running_requests"),
        ("/reset_prefix_cache?reset_running_requests=", "query.reset_running_requests"),
        ("/reset_prefix_cache?reset_running_requests=true&reset_running_requests=false", "query.reset_running_requests"),
    ],
)
def test_parameters_are_checked(server: Server, path: str, param: str) -> None:
    before = len(server.model.actions)
    refused = admin_call(server, path)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    assert len(server.model.actions) == before


@pytest.mark.parametrize("route", admin.ROUTES, ids=lambda route: route.path)
def test_a_body_is_refused(server: Server, route: admin.Route) -> None:
    refused = server.http.request(route.method, route.path, headers=bearer(ADMIN), json={"level": 2})
    assert refused.status_code == 400 and "query" in refused.json()["error"]["message"]


def test_routes_are_described(server: Server) -> None:
    paths = server.get("/openapi.json", headers=bearer(USER)).json()["paths"]
    for route in admin.ROUTES:
        described = paths[route.path][route.method.lower()].get("parameters", [])
        assert {p["name"] for p in described} == set(route.query.model_fields) and all(p["in"] == "query" for p in described)


# --- the prefix cache --------------------------------------------------------------------------------------------------


def test_reset_prefix_cache(server: Server) -> None:
    assert admin_call(server, "/reset_prefix_cache").json() == {"success": True}
    assert admin_call(server, "/reset_prefix_cache?reset_running_requests=true").json() == {"success": True}
    assert server.model.actions[-2:] == [ResetPrefixCache(False), ResetPrefixCache(True)]
