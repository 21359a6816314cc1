from __future__ import annotations

from tinkex._wire.endpoints import ENDPOINTS, endpoint


def test_no_two_rows_share_a_route() -> None:
    routes = [(row.method, row.path) for row in ENDPOINTS.values()]
    assert len(routes) == len(set(routes))


def test_ids_go_raw_into_paths_and_only_checkpoint_ids_keep_slashes() -> None:
    run = {"training_run_id": "s:train:0"}
    path = endpoint("delete_checkpoint").url_path({**run, "checkpoint_id": "weights/0001"})
    assert path == "/api/v1/training_runs/s:train:0/checkpoints/weights/0001"
    assert endpoint("get_training_run").url_path({"training_run_id": "a/b?c"}).endswith("/a%2Fb%3Fc")


def test_operations_that_finish_later_say_what_they_return() -> None:
    for row in ENDPOINTS.values():
        if row.is_future:
            assert row.request_type, row.name
            assert row.response is not None, row.name
