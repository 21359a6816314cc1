"""The dashboard: who sees what, who may act, and what its pages say when something is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import re
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

import pytest
from starlette.requests import Request
from starlette.responses import Response

from tests.unit.engine.api.asgi import Answer, Client
from tinkex.engine.api.app import build_app
from tinkex.engine.api.auth import signer_of
from tinkex.engine.api.dashboard.local import build_local_app
from tinkex.engine.api.dashboard.rendering import STATIC
from tinkex.engine.api.dashboard.sign_in import set_cookie
from tinkex.engine.api.dashboard.site import Dashboard
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.store import RolloutContent, RolloutRow, Store, open_reader
from tinkex.errors import SetupError

FORM = "application/x-www-form-urlencoded"
SAME_ORIGIN = {"origin": "http://127.0.0.1", "sec-fetch-site": "same-origin"}


@dataclass
class Browser:
    """A browser: it keeps cookies and says which site a request is from."""

    app: Any
    cookies: dict[str, str] = field(default_factory=dict)

    def send(
        self, method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        given = {"content-type": FORM, **(headers or {})}
        if self.cookies:
            given["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        parts = urlsplit(url)
        answer = Client(self.app).call(method, f"{unquote(parts.path)}?{parts.query}", body, given)
        cookie = answer.headers.get("set-cookie", "").partition(";")[0]
        if cookie:
            name, _, value = cookie.partition("=")
            self.cookies[name] = value.strip('"')
        return answer

    def open(self, url: str) -> Answer:
        """Follows a link on the site itself."""
        return self.send("GET", url, headers={"sec-fetch-site": "same-origin"})

    def text(self, url: str, status: int = 200) -> str:
        answer = self.open(url)
        assert answer.status == status, answer.body
        return answer.body.decode()

    def sign_in(self, key: str, address: str = "/") -> Answer:
        return self.send("POST", "/sign-in", urlencode({"key": key, "next": address}).encode(), SAME_ORIGIN)

    def form_token(self) -> str:
        found = re.search(r'name="form-token" content="([^"]*)"', self.text("/"))
        assert found is not None
        return found[1]

    def act(self, method: str, url: str, body: bytes = b"", **headers: str) -> Answer:
        """What a script of the page does."""
        given = {"content-type": "application/json", "x-tinkex-form": self.form_token(), **SAME_ORIGIN}
        return self.send(method, url, body, {**given, **headers})


@pytest.fixture(scope="module")
def app(engine: Engine) -> Any:
    return build_app(engine, dashboard=True)


@pytest.fixture
def operator(app: Any, engine: Engine) -> Browser:
    browser = Browser(app)
    assert browser.sign_in(engine.api_key).status == 303
    return browser


@pytest.fixture
def user(app: Any, engine: Engine) -> Browser:
    engine.store.users.add_key("bob", "tml-bob", 0.0)
    browser = Browser(app)
    assert browser.sign_in("tml-bob").status == 303
    return browser


@pytest.fixture(scope="module")
def runs(engine: Engine) -> Mapping[str, str]:
    """A run of the operator and one of bob, with metrics, rollouts and a checkpoint each."""
    engine.store.users.add_key("bob", "tml-bob", 0.0)
    made = {}
    for name, key in (("local", engine.api_key), ("bob", "tml-bob")):
        client = Client(build_app(engine), key)
        run_id = client.create()
        for number, kind in enumerate(("save_weights", "save_weights_for_sampler"), 1):
            body = {"model_id": run_id, "path": f"kept-{name}", "seq_id": number}
            client.result(client.post(kind, body))
        for step in range(1, 31):
            values = {"reward": math.nan if step == 7 else step / 10, '</script><b onload="x">': 1.0}
            engine.store.loop_metrics.log(run_id, name, step, values, time.time())
        content = RolloutContent(
            group="g", prompt="<i>hello</i>", tokens=(5, 6, 7), logprobs=(-0.1, -9.0, math.nan)
        )
        row = RolloutRow(run_id, 3, 0, time.time(), 0.5, -0.25, content)
        engine.store.rollouts.add([row], name, max_bytes_per_run=10**6, max_bytes_per_user=10**6)
        made[name] = run_id
    return made


def at(run_id: str, rest: str = "") -> str:
    return f"/runs/{quote(run_id)}{rest}"


# ---- signing in


def test_without_a_session_every_page_asks_to_sign_in(app: Any, runs: Mapping[str, str]) -> None:
    pages = ["/", "/runs", at(runs["local"]), "/compare", "/checkpoints", "/usage", "/playground"]
    for page in pages:
        answer = Browser(app).open(page)
        assert answer.status == 401
        text = answer.body.decode()
        assert 'action="/sign-in"' in text
        assert runs["local"] not in text.replace(quote(runs["local"]), "").replace(
            f'value="{at(runs["local"])}"', ""
        ).replace(f'value="/runs/{runs["local"]}"', "")
    for url in ("/dashboard/overview/events", f"/dashboard/series?run={quote(runs['local'])}"):
        assert Browser(app).open(url).status == 401


def test_a_key_is_exchanged_for_a_cookie_that_scripts_and_other_sites_do_not_get(
    app: Any, engine: Engine
) -> None:
    browser = Browser(app)
    answer = browser.sign_in(engine.api_key, "/runs?q=x")
    assert (answer.status, answer.headers["location"]) == (303, "/runs?q=x")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "secure" not in cookie  # over http
    assert engine.api_key not in answer.headers["set-cookie"]
    assert browser.open("/").status == 200


@pytest.mark.parametrize(("scheme", "is_secure"), [("https", True), ("http", False)])
def test_the_cookie_is_sent_over_tls_only_if_the_server_has_tls(scheme: str, is_secure: bool) -> None:
    scope = {"type": "http", "scheme": scheme, "server": ("a.example", 443), "path": "/", "query_string": b"", "headers": []}  # fmt: skip
    response = Response()
    set_cookie(Request(scope), response, "token")
    assert ("secure" in response.headers["set-cookie"].lower().split("; ")) == is_secure


def test_a_wrong_key_is_rejected_with_what_to_do_and_audited(app: Any, engine: Engine) -> None:
    browser = Browser(build_app(engine, dashboard=True))
    before = time.time() - 1
    answer = browser.sign_in("tml-guess")
    assert answer.status == 401
    assert "not a valid API key" in answer.body.decode()
    assert not browser.cookies
    entries = engine.store.audit.between(None, before, time.time() + 1, None, 100)
    assert "login_refused" in {entry.event for entry in entries}


@pytest.mark.parametrize("address", ["https://evil.example", "//evil.example", "/\\evil.example", "", "x"])
def test_after_signing_in_the_browser_stays_on_the_server(app: Any, engine: Engine, address: str) -> None:
    assert Browser(app).sign_in(engine.api_key, address).headers["location"] == "/"


def test_a_revoked_key_ends_its_sessions(app: Any, engine: Engine) -> None:
    key, row = engine.store.users.create_key("carol", time.time())
    browser = Browser(app)
    browser.sign_in(key)
    assert browser.open("/").status == 200
    engine.store.users.revoke(row.key_id, time.time())
    assert "has been revoked" in browser.text("/", 401)
    assert browser.open("/dashboard/overview/events").status == 401


def test_an_expired_session_says_so(app: Any, engine: Engine) -> None:
    key = engine.store.users.find_key(engine.api_key)
    assert key is not None
    claims = {"key": key.key_id, "sid": "old", "host": "127.0.0.1"}
    browser = Browser(app)
    browser.cookies["tinkex-80"] = signer_of(engine).issue("dashboard", claims, time.time() - 1)
    assert "sign-in has ended" in browser.text("/runs", 401)


def test_a_session_is_for_the_host_where_it_began(app: Any, operator: Browser) -> None:
    elsewhere = {"host": "rebound.example", "sec-fetch-site": "same-origin"}
    for url in ("/", "/dashboard/overview/events", "/dashboard/api/v1/sessions/s/trace_export"):
        assert operator.send("GET", url, headers=elsewhere).status == 403
    assert operator.open("/").status == 200


def test_a_token_of_the_api_is_not_a_session_and_a_session_is_not_a_token(
    app: Any, engine: Engine, ada: Client, operator: Browser
) -> None:
    browser = Browser(app)
    browser.cookies["tinkex-80"] = ada.post("auth/token", {}).json["jwt"]
    assert browser.open("/").status == 401
    (session,) = operator.cookies.values()
    assert Client(app, session).get("sessions").status == 401
    assert operator.send("GET", "/api/v1/sessions").status == 401  # the API takes no cookie


def test_signing_out_ends_the_session_also_for_a_copy_of_its_cookie(app: Any, operator: Browser) -> None:
    copy = Browser(app, dict(operator.cookies))
    form = urlencode({"x-tinkex-form": operator.form_token()}).encode()
    assert operator.send("POST", "/sign-out", b"x-tinkex-form=guess", SAME_ORIGIN).status == 403
    assert operator.send("POST", "/sign-out", form, SAME_ORIGIN).status == 303
    assert "signed out" in copy.text("/", 401)


def test_without_keys_there_is_no_sign_in_and_without_the_dashboard_no_page(
    tiny_model: Path, tmp_path: Path, engine: Engine
) -> None:
    engine_without_keys = Engine(EngineConfig(home=tmp_path, models={"tiny": str(tiny_model)}, auth=False))
    try:
        browser = Browser(build_app(engine_without_keys, dashboard=True))
        assert "Overview" in browser.text("/")
        assert browser.open("/sign-in").status == 404
        rebound = Client(build_app(engine_without_keys, dashboard=True)).call(
            "GET", "/", headers={"host": "rebound.example"}
        )
        assert rebound.status == 403
    finally:
        engine_without_keys.close()
    assert Browser(build_app(engine)).open("/").status == 404


# ---- other sites


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://localhost:3000"},
        {"origin": "null"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
    ],
)
def test_a_page_of_another_origin_reads_and_changes_nothing(
    operator: Browser, runs: Mapping[str, str], headers: Mapping[str, str]
) -> None:
    token = operator.form_token()
    for url in ("/", f"/dashboard/series?run={quote(runs['local'])}&metric=logged/reward"):
        assert operator.send("GET", url, headers=headers).status == 403
    url = f"/dashboard/api/v1/training_runs/{quote(runs['local'])}/checkpoints/weights/kept-local"
    assert operator.send("DELETE", url, headers={**headers, "x-tinkex-form": token}).status == 403
    assert operator.send("POST", "/sign-in", b"key=x", headers).status == 403


def test_a_link_on_another_site_opens_a_page_that_gets_the_cookie(app: Any, operator: Browser) -> None:
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert operator.send("GET", "/runs", headers=link).status == 200
    # A browser leaves the cookie out; the page that it gets opens the same address, as a page of this site.
    answer = Browser(app).send("GET", "/runs?q=a", headers=link)
    assert answer.status == 200
    assert 'content="0; url=/runs?q=a"' in answer.body.decode()


def test_what_changes_something_needs_the_token_of_a_page_of_the_session(
    operator: Browser, user: Browser, runs: Mapping[str, str]
) -> None:
    url = f"/dashboard/api/v1/training_runs/{quote(runs['local'])}/checkpoints/weights/kept-local/publish"
    assert operator.send("POST", url, headers=SAME_ORIGIN).status == 403
    theirs = {**SAME_ORIGIN, "x-tinkex-form": user.form_token()}
    assert operator.send("POST", url, headers=theirs).status == 403
    assert operator.act("POST", url).status == 200
    assert operator.act("DELETE", url).status == 200


def test_pages_allow_nothing_but_what_the_server_itself_sends(operator: Browser, app: Any) -> None:
    for answer in (operator.open("/"), operator.open("/runs/none"), Browser(app).open("/")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        text = answer.body.decode()
        assert not re.search(r"<script(?![^>]*\bsrc=)", text)
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|(?:src|href)=\"(?:https?:)?//", text)


def test_vendored_files_are_those_of_their_release() -> None:
    """uPlot 1.6.32, from its package uplot-1.6.32.tgz; to update it, take the files of another release."""
    digests = {
        "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    found = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (STATIC / "vendor").iterdir()
    }
    assert found == digests
    assert b"v1.6.32" in (STATIC / "vendor" / "uPlot.iife.min.js").read_bytes()[:400]
    assert b"MIT License" in (STATIC / "vendor" / "uPlot.LICENSE").read_bytes()


def test_static_files_are_served_to_everyone_and_nothing_else_is(app: Any) -> None:
    anyone = Browser(app)
    page = anyone.open("/").body.decode()
    sources = re.findall(r'(?:src|href)="(/dashboard/static/[^"]+)"', page)
    assert len(sources) >= 4
    for source in sources:
        assert anyone.open(source).status == 200
    base = sources[0].rpartition("/")[0]
    assert anyone.open(f"{base}/../rendering.py").status == 404
    assert anyone.open(f"{base}/%2e%2e/rendering.py").status == 404


# ---- who sees what


def test_a_user_sees_their_own_and_the_operator_what_all_have(
    operator: Browser, user: Browser, runs: Mapping[str, str]
) -> None:
    for page in ("/runs", "/checkpoints", "/usage"):
        assert quote(runs["local"]) in operator.text(page)
        assert quote(runs["bob"]) in operator.text(page)
        assert quote(runs["bob"]) in user.text(page)
        assert quote(runs["local"]) not in user.text(page)
    for rest in ("", "/rollouts"):
        assert operator.open(at(runs["bob"], rest)).status == 200
        assert "that you can see" in user.text(at(runs["local"], rest), 404)
    metric = "&metric=logged/reward"
    for url in (f"/dashboard/series?run={quote(runs['local'])}{metric}", f"/dashboard/series.csv?run={quote(runs['local'])}{metric}", f"/dashboard/series/events?run={quote(runs['local'])}", f"/dashboard/runs/{quote(runs['local'])}/operations"):  # fmt: skip
        assert user.open(url).status == 404
    compared = f"/compare?run={quote(runs['local'])}&run={quote(runs['bob'])}"
    assert user.open(compared).status == 404
    assert operator.open(compared).status == 200
    assert "tml-" not in user.text("/usage").replace("tml-…", "")


def test_a_user_cannot_act_on_what_belongs_to_others(
    user: Browser, engine: Engine, runs: Mapping[str, str]
) -> None:
    base = f"/dashboard/api/v1/training_runs/{quote(runs['local'])}/checkpoints/weights/kept-local"
    assert user.act("DELETE", base).status == 404
    assert user.act("POST", f"{base}/publish").status == 404
    assert engine.store.checkpoints.get(runs["local"], "weights", "kept-local") is not None


def test_runs_are_found_by_text_status_model_and_owner(operator: Browser, runs: Mapping[str, str]) -> None:
    def found(**query: str) -> list[str]:
        text = operator.text(f"/runs?{urlencode(query)}")
        return [name for name, run_id in runs.items() if f'value="{run_id}"' in text]

    assert found() == ["local", "bob"]
    assert found(q=runs["bob"][:13]) == ["bob"]
    assert found(owner="local") == ["local"]
    assert found(status="live", model="tiny") == ["local", "bob"]
    assert found(status="failed") == []
    assert found(q="%") == []
    assert found(q="' OR 1=1 --") == []


def test_the_overview_says_who_waits_for_what_and_why(
    operator: Browser, user: Browser, engine: Engine, ada: Client
) -> None:
    run_id = ada.create()
    with engine.paused():
        accepted = ada.post("save_weights", {"model_id": run_id, "path": "waits", "seq_id": 1})
        text = operator.text("/")
        assert "<td>save_weights</td>" in text
        assert "in line with 0 other training operations" in text
        seen = user.text("/")
        assert run_id not in seen
        assert "1 of other users" in seen
    ada.result(accepted)
    assert "Nothing waits." in operator.text("/")


def test_the_overview_and_the_health_count_samplers_whose_number_follows_the_load(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = EngineConfig(
        home=tmp_path, models={"tiny": str(tiny_model)}, threads=1, min_samplers=2, max_samplers=5
    )
    engine = Engine(config)
    try:
        engine.start()
        engine.load_models().result(120)
        browser = Browser(build_app(engine, dashboard=True))
        browser.sign_in(engine.api_key)
        assert "Samplers: 2 running; 2 to 5 with the load" in browser.text("/")
        health = json.loads(browser.text("/api/v1/healthz"))
        assert sorted(health["lanes"]) == ["sampler-0", "sampler-1", "trainer-0"]
        assert health["samplers"] == {"running": 2, "starting": 0, "draining": 0, "fewest": 2, "most": 5}
    finally:
        engine.close()


def test_the_files_of_another_version_are_rejected_by_the_read_only_pages(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with open_reader(tmp_path) as reader:
        assert "read-only" in Browser(build_local_app(reader)).text("/")
    with contextlib.closing(sqlite3.connect(tmp_path / "engine.db")) as database:
        database.execute("PRAGMA user_version = 3")
    with open_reader(tmp_path) as reader, pytest.raises(SetupError, match="another version"):
        build_local_app(reader)


# ---- acting


def test_actions_on_a_checkpoint_are_those_of_the_api_and_audited(
    operator: Browser, engine: Engine, ada: Client
) -> None:
    run_id = ada.create()
    ada.result(ada.post("save_weights", {"model_id": run_id, "path": "a", "seq_id": 1}))
    base = f"/dashboard/api/v1/training_runs/{quote(run_id)}/checkpoints/weights/a"
    assert operator.act("PUT", f"{base}/ttl", b'{"ttl_seconds": 3600}').status == 200
    assert operator.act("PUT", f"{base}/ttl", b'{"ttl_seconds": -1}').status == 400
    row = engine.store.checkpoints.get(run_id, "weights", "a")
    assert row is not None
    assert row.expires_at is not None
    archive = operator.open(f"{base}/archive")
    assert archive.status == 302
    assert operator.open(archive.headers["location"].removeprefix("http://127.0.0.1")).status == 200
    assert operator.act("DELETE", base).status == 200
    assert engine.store.checkpoints.get(run_id, "weights", "a") is None
    events = {entry.event for entry in engine.store.audit.between("local", 0, time.time() + 1, None, 1000)}
    assert {"checkpoint_delete", "checkpoint_ttl_set", "checkpoint_read"} <= events


def test_the_playground_samples_through_the_compatible_route(
    operator: Browser, runs: Mapping[str, str]
) -> None:
    text = operator.text("/playground")
    assert f"tinker://{runs['local']}/sampler_weights/kept-local" in text
    assert f"tinker://{runs['bob']}/" not in text
    body = {
        "model": f"tinker://{runs['local']}/sampler_weights/kept-local",
        "prompt": "The river",
        "max_tokens": 4,
        "stream": True,
        "logprobs": 2,
    }
    answer = operator.act("POST", "/dashboard/oai/api/v1/completions", json.dumps(body).encode())
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = [
        json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")
    ]
    tokens = [
        token for chunk in chunks for token in (chunk["choices"][0]["logprobs"] or {"tokens": []})["tokens"]
    ]
    assert len(tokens) == 4


# ---- curves


def series(browser: Browser, run_id: str, **more: object) -> Any:
    query = urlencode({"run": run_id, "metric": "logged/reward", **more})
    return json.loads(browser.text(f"/dashboard/series?{query}"))["metrics"][0]["runs"].get(run_id)


def test_a_value_that_is_not_finite_is_a_gap(operator: Browser, runs: Mapping[str, str]) -> None:
    found = series(operator, runs["local"])
    assert found["value"][found["step"].index(7)] is None
    assert found["value"][-1] == 3.0


def test_names_of_metrics_are_data_on_every_page(operator: Browser, runs: Mapping[str, str]) -> None:
    hostile = '</script><b onload="x">'
    compared = f"/compare?run={quote(runs['local'])}&run={quote(runs['bob'])}"
    for page in (at(runs["local"]), compared):
        text = operator.text(page)
        assert hostile not in text
        assert "<b onload" not in text
    assert "<i>hello</i>" not in operator.text(at(runs["local"], "/rollouts"))
    csv = operator.text(
        f"/dashboard/series.csv?{urlencode({'run': runs['local'], 'metric': f'logged/{hostile}'})}"
    )
    assert len(csv.splitlines()) == 31


@pytest.mark.slow
def test_a_long_run_is_downsampled_and_exact_where_it_is_zoomed(
    operator: Browser, engine: Engine, ada: Client
) -> None:
    run_id, now = ada.create(), time.time()
    metrics = engine.store.loop_metrics
    with engine.store.database.transaction():
        for step in range(20_000):
            metrics.log(run_id, "local", step, {"reward": 1000.0 if step == 12_345 else step % 7}, now)
    whole = series(operator, run_id, points=500)
    assert not whole["exact"]
    assert whole["total"] == 20_000
    assert len(whole["step"]) <= 500
    assert whole["value"][whole["step"].index(12_345)] == 1000.0  # spikes stay
    assert (whole["step"][0], whole["step"][-1]) == (0, 19_999)
    part = series(operator, run_id, points=500, start=12_300, stop=12_399)
    assert part["exact"]
    assert part["step"] == list(range(12_300, 12_400))
    csv = operator.text(f"/dashboard/series.csv?{urlencode({'run': run_id, 'metric': 'logged/reward'})}")
    assert len(csv.splitlines()) == 20_001


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 400),
        ("metric=reward&run={run}", 400),
        ("metric=logged/reward&run={run}&start=x", 400),
        ("metric=logged/reward&run=none", 404),
    ],
)
def test_a_wrong_request_for_curves_says_what_to_give(
    operator: Browser, runs: Mapping[str, str], query: str, status: int
) -> None:
    answer = operator.open(f"/dashboard/series?{query.format(run=quote(runs['local']))}")
    assert answer.status == status
    assert answer.detail


@pytest.mark.parametrize(
    ("page", "status", "says"),
    [
        ("/runs/no-such-run", 404, "no-such-run"),
        ("/compare?run=a", 400, "choose 2 to 6"),
        ("/usage?period=decade", 400, "choose one of"),
        ("/runs?page=-4", 200, "Page 1"),
    ],
)
@pytest.mark.usefixtures("runs")
def test_a_wrong_address_gives_a_page_that_says_what_is_wrong(
    operator: Browser, page: str, status: int, says: str
) -> None:
    assert says in operator.text(page, status)


def test_rollouts_are_shown_by_group_with_rewards(operator: Browser, runs: Mapping[str, str]) -> None:
    text = operator.text(at(runs["local"], "/rollouts"))
    assert "&lt;i&gt;hello" in text
    assert "mean reward 0.5" in text
    assert 'class="l10' in text
    assert "has no rollouts of step 99" in operator.text(at(runs["local"], "/rollouts?step=99"), 404)
    assert "give a whole number" in operator.text(at(runs["local"], "/rollouts?step=x"), 400)


def test_tokens_of_rollouts_are_text_also_where_several_spell_a_character(
    operator: Browser, engine: Engine, runs: Mapping[str, str], tiny_model: Path
) -> None:
    tokens = tuple(EngineTokenizer(tiny_model).encode("a ☃ b", add_special_tokens=False))
    content = RolloutContent(group="snow", prompt_tokens=tokens, tokens=(*tokens, 10**9))
    row = RolloutRow(runs["local"], 4, 0, time.time(), 1.0, 0.5, content)
    engine.store.rollouts.add([row], "local", max_bytes_per_run=10**6, max_bytes_per_user=10**6)
    text = operator.text(at(runs["local"], "/rollouts?step=4"))
    assert '<pre class="prompt">a ☃ b</pre>' in text
    shown = "".join(re.findall(r'<span class=" a10"[^>]*>([^<]*)</span>', text))
    assert shown.replace("▯", "") == "a ☃ b‹1000000000›"


def test_the_read_only_pages_find_the_tokenizers_of_this_machine(tiny_model: Path, tmp_path: Path) -> None:
    Store(tmp_path).close()
    with open_reader(tmp_path) as reader:
        site = Dashboard(reader, models_home=tmp_path)
        found = site.tokenizer(str(tiny_model))
        assert found is not None
        assert found.decode(found.encode("The river")) == "The river"
        assert site.tokenizer("no-one/has-this") is None


async def read_events(app: Any, browser: Browser, url: str, act: Any) -> list[tuple[str, Any]]:
    """Opens a stream; ``act`` is called with each event, and ends the stream by returning true."""
    path, _, query = url.partition("?")
    cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    headers = [(b"host", b"127.0.0.1"), (b"cookie", cookie.encode()), (b"sec-fetch-site", b"same-origin")]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "", "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}  # fmt: skip
    gone = asyncio.Event()
    events: list[tuple[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        for block in message.get("body", b"").decode().split("\n\n"):
            name, _, data = block.partition("\ndata: ")
            if data:
                event = (name.removeprefix("event: "), json.loads(data))
                events.append(event)
                if act(event):
                    gone.set()

    await asyncio.wait_for(app(scope, receive, send), 60)
    return events


@pytest.mark.slow
async def test_new_values_reach_a_page_that_follows_its_run(
    app: Any, operator: Browser, engine: Engine, ada: Client
) -> None:
    run_id = await asyncio.to_thread(ada.create)

    def act(event: tuple[str, Any]) -> bool:
        if event[0] == "ready":
            engine.store.loop_metrics.log(run_id, "local", 100, {"reward": 42.0}, time.time())
        return event[0] == "message"

    events = await read_events(app, operator, f"/dashboard/series/events?run={quote(run_id)}", act)
    assert [name for name, _ in events] == ["ready", "message"]
    assert events[1][1][run_id]["logged/reward"]["value"] == [42.0]


@pytest.mark.slow
async def test_a_stream_ends_when_its_key_is_revoked(app: Any, engine: Engine) -> None:
    key, row = await asyncio.to_thread(engine.store.users.create_key, "dora", time.time())
    browser = Browser(app)
    await asyncio.to_thread(browser.sign_in, key)

    def act(event: tuple[str, Any]) -> bool:
        if event[0] == "message":
            engine.store.users.revoke(row.key_id, time.time())
        return False

    events = await read_events(app, browser, "/dashboard/overview/events", act)
    assert events[-1][0] == "ended"
