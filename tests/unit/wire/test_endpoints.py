from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from tinkex._wire.endpoints import ENDPOINTS, endpoint

OLDER = {"/api/v1/forward", "/api/v1/unload_model", "/api/v1/training_runs/{}/checkpoints/{}/archive"}
"""Paths of the official protocol that its newest client no longer calls."""

DOCUMENTED = {
    "/api/v1/external_weights_upload_start",
    "/api/v1/external_weights_upload_finish",
    "/api/v1/checkpoints/search",
}
"""Calls of 0.39, by its documentation: its client is not at hand."""


def test_no_two_endpoints_share_a_route() -> None:
    routes = [(entry.method, entry.path) for entry in ENDPOINTS.values()]
    assert len(routes) == len(set(routes))


def test_ids_go_raw_into_paths_and_only_checkpoint_ids_keep_slashes() -> None:
    run = {"training_run_id": "s:train:0"}
    path = endpoint("delete_checkpoint").url_path({**run, "checkpoint_id": "weights/0001"})
    assert path == "/api/v1/training_runs/s:train:0/checkpoints/weights/0001"
    assert endpoint("get_training_run").url_path({"training_run_id": "a/b?c"}).endswith("/a%2Fb%3Fc")


def test_operations_that_finish_later_say_what_they_return() -> None:
    for entry in ENDPOINTS.values():
        if entry.is_future:
            assert entry.request_type, entry.name
            assert entry.response is not None, entry.name


def test_exactly_the_endpoints_that_no_official_client_calls_are_extensions() -> None:
    official = official_paths() | OLDER | DOCUMENTED
    extensions = {entry.name for entry in ENDPOINTS.values() if entry.extension}
    assert {entry.name for entry in ENDPOINTS.values() if shape(entry.path) not in official} == extensions
    assert {"stream_sample", "upload_assets", "tokenizer_file", "download"} <= extensions
    assert official <= {shape(entry.path) for entry in ENDPOINTS.values()}, "served, every one of them"


def official_paths() -> set[str]:
    """The paths that are spelled out in the source of the official client."""
    spec = find_spec("tinker")
    assert spec is not None
    assert spec.origin is not None
    modules = [path for path in Path(spec.origin).parent.rglob("*.py") if "test" not in path.name]
    return {
        shape(path)
        for module in modules
        for path in re.findall(r"[\"'](/api/v1/[^\"'?]*)[\"']", module.read_text("utf-8"))
    }


def shape(path: str) -> str:
    """A path without the names of its parameters."""
    return re.sub(r"\{[^}]*\}", "{}", path)
