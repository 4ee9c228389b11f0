"""Every JSON answer to a GET has an entity tag, and is not sent again to those who have it."""

from __future__ import annotations

import httpx
import pytest

from tests.service.sending import make_batch, start_run

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def test_lists_and_objects_are_known_by_their_tags_until_they_change(http: httpx.Client) -> None:
    sender = start_run(http)
    sender.put_shard(1, make_batch()).raise_for_status()
    run = f"/v1/runs/{sender.run}"
    changing = ["/v1/runs", run, f"{run}/steps"]
    lasting = ["/v1/measures", f"{run}/steps/1/buckets", f"{run}/alerts", "/v1/alerts", "/v1/probes"]
    tags = {path: http.get(path).raise_for_status().headers["etag"] for path in (*changing, *lasting)}

    def known(path: str) -> httpx.Response:
        return http.get(path, headers={"If-None-Match": tags[path]})

    for path in tags:
        answer = known(path)
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tags[path]), path
        assert "content-length" not in answer.headers or answer.headers["content-length"] == "0"
    sender.put_shard(2, make_batch(seed=2)).raise_for_status()
    for path in changing:
        answer = known(path)
        assert answer.status_code == 200, path
        assert answer.headers["etag"] != tags[path]
        assert answer.json()
    assert [known(path).status_code for path in lasting] == [304] * len(lasting)


def test_errors_and_other_methods_have_no_tag(http: httpx.Client) -> None:
    missing = http.get("/v1/runs/none", headers={"If-None-Match": "*"})
    assert missing.status_code == 404
    assert "etag" not in missing.headers
    made = http.post("/v1/runs", json={"key": "tagged"}, headers={"If-None-Match": "*"})
    assert made.status_code in (200, 201)
    assert "etag" not in made.headers


def test_every_get_documents_that_it_may_be_unchanged(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    for address, operations in paths.items():
        if address.startswith("/v1/") and "get" in operations:
            assert "304" in operations["get"]["responses"], address
