"""What web pages can do to a server, tried in a real browser."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import Chromium, Visit
from tests.programs import need_program
from tests.servers import ServedEngine, serve

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def chromium(tmp_path: Path) -> Chromium:
    return Chromium(need_program("chromium"), tmp_path / "profile")


@pytest.fixture(scope="module")
def without_keys(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    need_program("chromium")
    with serve(tmp_path_factory.mktemp("open"), "--no-auth", "--model", f"tiny={tiny_model}") as server:
        yield server


def sessions(server: ServedEngine) -> int:
    request = urllib.request.Request(f"{server.url}/api/v1/sessions", headers={"X-API-Key": server.key})
    with urllib.request.urlopen(request, timeout=60) as response:
        return len(json.loads(response.read())["sessions"])


ATTACK = """
const target = "%s/api/v1/create_session";
const found = {};
const attempt = async (name, url, options) => {
  try { const reply = await fetch(url, options); found[name] = reply.type + " " + reply.status; }
  catch (error) { found[name] = "blocked"; }
};
const text = {method: "POST", mode: "no-cors", body: "{}", headers: {"Content-Type": "text/plain"}};
await attempt("simple post", target, text);
await attempt("json post", target, {method: "POST", body: "{}", headers: {"Content-Type": "application/json"}});
await attempt("read", target.replace("create_session", "sessions"), {});
navigator.sendBeacon(target, new Blob(["{}"], {type: "text/plain"}));
const load = (frame) => new Promise((done) => { frame.onload = done; document.body.append(frame); });
const sandbox = document.createElement("iframe");
sandbox.sandbox = "allow-scripts";
sandbox.srcdoc = `<script>
  fetch("${target}", ${JSON.stringify(text)}).finally(() => parent.postMessage("sent", "*"));
</script>`;
const sent = new Promise((done) => addEventListener("message", done));
await load(sandbox);
await sent;
const frame = document.createElement("iframe");
frame.name = "answer";
await load(frame);
const form = document.createElement("form");
Object.assign(form, {method: "post", enctype: "text/plain", action: target, target: "answer"});
const field = document.createElement("input");
Object.assign(field, {name: '{"sdk_version":"', value: '"}'});
form.append(field);
document.body.append(form);
const answered = new Promise((done) => { frame.onload = done; });
form.submit();
await answered;
return found;
"""


@pytest.mark.parametrize("host", ["pages.test", "127.0.0.1", "localhost"])
def test_a_page_of_another_origin_cannot_drive_a_server_without_keys(
    host: str, without_keys: ServedEngine, pages: int, chromium: Chromium
) -> None:
    (visited,) = chromium.visit(Visit(f"http://{host}:{pages}/", ATTACK % without_keys.url))
    # The page cannot see that its simple request was rejected, only that there was an answer.
    assert visited.value == {"simple post": "opaque 0", "json post": "blocked", "read": "blocked"}
    assert sessions(without_keys) == 0


def test_a_name_that_was_rebound_to_this_machine_does_not_reach_a_server_without_keys(
    without_keys: ServedEngine, chromium: Chromium
) -> None:
    port = without_keys.url.rpartition(":")[2]
    script = """
    const json = {"Content-Type": "application/json"};
    return (await fetch("/api/v1/create_session", {method: "POST", body: "{}", headers: json})).status
    """
    (visited,) = chromium.visit(Visit(f"http://rebound.test:{port}/api/v1/healthz", script))
    assert (visited.status, visited.value) == (403, 403)
    assert sessions(without_keys) == 0


def test_an_address_that_the_user_types_is_answered(without_keys: ServedEngine, chromium: Chromium) -> None:
    (visited,) = chromium.visit(Visit(f"{without_keys.url}/api/v1/healthz", "return document.body.innerText"))
    assert visited.status == 200
    assert '"ok"' in visited.value


def test_only_an_allowed_page_uses_a_server_with_keys(
    tiny_model: Path, tmp_path: Path, pages: int, chromium: Chromium
) -> None:
    chat, other = (f"http://{name}.test:{pages}" for name in ("chat", "other"))
    with serve(tmp_path, "--model", f"tiny={tiny_model}", "--allow-origin", chat) as server:
        script = f"""
        const headers = {{"Content-Type": "application/json", "X-API-Key": "{server.key}"}};
        try {{
          const reply = await fetch("{server.url}/api/v1/create_session", {{method: "POST", body: "{{}}", headers}});
          return [reply.status, Boolean((await reply.json()).session_id), Boolean(reply.headers.get("x-request-id"))];
        }} catch (error) {{ return "blocked"; }}
        """
        allowed, foreign = chromium.visit(Visit(chat, script), Visit(other, script))
        assert allowed.value == [200, True, True]
        assert foreign.value == "blocked"
        assert sessions(server) == 1
