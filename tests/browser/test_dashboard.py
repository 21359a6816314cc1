"""The dashboard in a real browser: signing in, live curves, comparing, sampling, acting, and what it keeps out."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
import uvicorn

from tests.browser.window import Window, open_window
from tests.programs import need_program
from tests.unit.engine.api.asgi import Client
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.engine.store import RolloutContent, RolloutRow

pytestmark = [pytest.mark.browser, pytest.mark.slow]

HOSTILE = '<img src="x" onerror="document.title=`hacked`">'
UNAUTHORIZED, NOT_FOUND = (
    f"Failed to load resource: the server responded with a status of {status}"
    for status in ("401 (Unauthorized)", "404 (Not Found)")
)


@dataclass(frozen=True)
class Site:
    """A server with a dashboard, whose engine is at hand, and the runs that it has."""

    url: str
    engine: Engine
    runs: Mapping[str, str]

    def log(self, name: str, step: int, values: Mapping[str, float]) -> None:
        owner = "bob" if name == "bob" else "local"
        self.engine.store.loop_metrics.log(self.runs[name], owner, step, values, time.time())

    def page(self, name: str, rest: str = "") -> str:
        return f"{self.url}/runs/{quote(self.runs[name])}{rest}"


@pytest.fixture(scope="module")
def site(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    need_program("chromium")
    engine = Engine(EngineConfig(home=tmp_path_factory.mktemp("site"), models={"tiny": str(tiny_model)}))
    engine.start()
    engine.load_models().result()
    engine.store.users.add_key("bob", "tml-bob", 0.0)
    runs = {}
    for name, key in (("first", engine.api_key), ("second", engine.api_key), ("bob", "tml-bob")):
        client = Client(build_app(engine), key)
        run_id = runs[name] = client.create()
        for number, kept in enumerate(("keep", "drop"), 1):
            body = {"model_id": run_id, "path": kept, "seq_id": number}
            client.result(client.post("save_weights_for_sampler", body))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Site(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, runs)
        for name in runs:
            for step in range(1, 41):
                loss = math.nan if step == 9 else math.exp(-step / 20) + 0.1 * (name == "second")
                made.log(name, step, {"loss": loss, HOSTILE: 1.0})
        content = RolloutContent(group="one", prompt="Q", tokens=(70, 71), logprobs=(-0.1, -5.0))
        row = RolloutRow(runs["first"], 4, 0, time.time(), 0.5, 0.25, content)
        engine.store.rollouts.add([row], "local", max_bytes_per_run=10**6, max_bytes_per_user=10**6)
        config = uvicorn.Config(
            build_app(engine, dashboard=True),
            log_config=None,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=5,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        yield made
        engine.end_waits()
        server.should_exit = True
        thread.join()
    engine.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Window]:
    with open_window(need_program("chromium")) as window:
        yield window


@pytest.fixture
def signed_in(site: Site, browser: Window) -> Callable[..., Window]:
    """Opens a window and signs in, as the operator unless another key is given."""

    def sign_in(key: str = "", **window: object) -> Window:
        browser.open(**window)  # type: ignore[arg-type]
        assert browser("goto", f"{site.url}/") == 401
        browser("fill", "input[name=key]", key or site.engine.api_key)
        browser("click", "form button.primary")
        browser("until", "document.querySelector('#status') !== null")
        assert browser("messages") == [UNAUTHORIZED]  # the page that asks to sign in
        return browser

    return sign_in


def test_a_live_run_s_curve_grows(site: Site, signed_in: Callable[..., Window]) -> None:
    window = signed_in()
    window("goto", site.page("first"))
    panel = "document.querySelector('[data-metric=\"logged/loss\"]')"
    window("until", f"{panel}?.dataset.points === '40'")
    window("until", "document.querySelector('[data-live]').textContent === 'live'")
    site.log("first", 41, {"loss": 0.125})
    window("until", f"{panel}.dataset.points === '41'")
    assert "0.125" in window("evaluate", f"return {panel}.getAttribute('aria-label')")
    site.log("first", 42, {"accuracy": 0.5})  # a metric that is new
    window("until", "document.querySelector('[data-metric=\"logged/accuracy\"]')?.dataset.points === '1'")
    assert window("evaluate", "return document.title") != "hacked"
    assert window("evaluate", "return document.querySelectorAll('figure img').length") == 0
    assert window("messages") == []


SHOW_TAB = """
Object.defineProperty(document, "hidden", {value: %s, configurable: true});
document.dispatchEvent(new Event("visibilitychange"));
"""


def test_a_tab_in_the_background_holds_no_connection_and_goes_on_where_it_was(
    site: Site, signed_in: Callable[..., Window]
) -> None:
    window = signed_in()
    window("goto", site.page("second"))
    live = "document.querySelector('[data-live]').textContent"
    panel = "document.querySelector('[data-metric=\"logged/loss\"]')"
    window("until", f"{live} === 'live' && {panel}?.dataset.points === '40'")
    window("evaluate", f"window.panel = {panel}")
    window("evaluate", SHOW_TAB % "true")
    assert window("evaluate", f"return {live}") == "paused"
    site.log("second", 41, {"loss": 0.5})
    window("evaluate", SHOW_TAB % "false")
    window("until", f"{live} === 'live' && {panel}.dataset.points === '41'")
    assert window("evaluate", f"return window.panel === {panel}")  # with its zoom and the focus
    assert window("messages") == []


def test_steps_that_were_logged_in_another_order_are_drawn_by_time(
    site: Site, signed_in: Callable[..., Window]
) -> None:
    window = signed_in()
    for step in (20, 10, 15):
        site.log("second", step, {"late": step})
    window("goto", site.page("second"))
    panel = '[data-metric="logged/late"]'
    window("until", f"document.querySelector('{panel}')?.dataset.points === '3'")
    window("click", "input[name=x][value=time]")
    window("drag", f"{panel} .u-over", 0.0, 1.0)
    window("until", f"document.querySelector('{panel}').dataset.exact === 'true'")
    window(
        "evaluate", f"document.querySelector('{panel} .u-over').dispatchEvent(new MouseEvent('mousemove'))"
    )
    assert window("messages") == []


COUNT_BLUE = """
const canvas = document.querySelector('[data-metric="%s"] canvas');
const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
let count = 0;
for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 200 && data[at + 2] > data[at] + 80) count += 1;
return count;
"""


def test_constants_and_values_between_gaps_are_drawn_on_both_scales(
    site: Site, signed_in: Callable[..., Window]
) -> None:
    window = signed_in()
    for step in range(1, 21):
        site.log("second", step, {"rate": 0.001, "sparse": math.nan if step % 2 else 1.0, "negative": -1.0})
    window("goto", site.page("second"))
    window("until", "document.querySelector('[data-metric=\"logged/sparse\"]')?.dataset.points === '20'")
    for metric in ("logged/rate", "logged/sparse"):
        assert window("evaluate", COUNT_BLUE % metric) > 50, metric
    window("evaluate", "const s = document.querySelector('[name=smoothing]'); s.value = 0.8; s.dispatchEvent(new Event('input', {bubbles: true}))")  # fmt: skip
    window("click", "input[name=log]")
    for metric in ("logged/rate", "logged/sparse"):
        assert window("evaluate", COUNT_BLUE % metric) > 50, metric
    says = "return document.querySelector('[data-metric=\"logged/negative\"] .readout').textContent"
    assert window("evaluate", says) == "No positive values to show."
    assert window("messages") == []


def test_two_runs_are_compared_by_keyboard_alone(site: Site, browser: Window) -> None:
    browser.open()
    browser("goto", f"{site.url}/runs")
    browser("type", site.engine.api_key)  # the field has the focus
    browser("press", "Enter")
    browser("until", "document.querySelector('#compare') !== null")
    assert browser("messages") == [UNAUTHORIZED]

    def go_to(test: str) -> None:
        for _ in range(60):
            browser("press", "Tab")
            if browser("evaluate", f"const at = document.activeElement; return {test}"):
                return
        raise AssertionError(f"the keyboard does not reach {test}")

    for name in ("second", "first"):
        go_to(f"at.name === 'run' && at.value === '{site.runs[name]}'")
        browser("press", "Space")
    go_to("at.id === 'compare-button'")
    browser("press", "Enter")
    browser("until", "document.querySelector('.legend')?.children.length === 2")
    browser("until", "document.querySelector('figure')?.dataset.points >= 40")
    go_to("at.tagName === 'FIGURE'")
    browser("press", "+")
    browser("until", "document.querySelector('figure').dataset.exact === 'true'")
    browser("press", "0")
    browser("until", "document.querySelector('figure').dataset.exact === undefined")
    assert browser("messages") == []


def test_a_chart_is_smoothed_zoomed_and_downloaded(site: Site, signed_in: Callable[..., Window]) -> None:
    window = signed_in()
    runs = "&".join(f"run={quote(site.runs[name])}" for name in ("first", "second"))
    window("goto", f"{site.url}/compare?{runs}&metric=logged/loss")
    figure = "document.querySelector('[data-metric=\"logged/loss\"]')"
    window("until", f"{figure}?.dataset.points >= 40")
    for x in ("tokens", "time", "step"):
        window("click", f"input[name=x][value={x}]")
    window("click", "input[name=log]")
    window("evaluate", "const s = document.querySelector('[name=smoothing]'); s.value = 0.9; s.dispatchEvent(new Event('input', {bubbles: true}))")  # fmt: skip
    window("drag", "figure .u-over", 0.2, 0.4)
    window("until", f"{figure}.dataset.exact === 'true'")
    name, size = window("download", "figure .tools button[aria-label*=PNG]")
    assert (name, size > 3000) == ("loss.png", True)
    name, size = window("download", "figure .tools a")
    assert (name, size > 1000) == ("loss.csv", True)
    assert window("messages") == []


def test_the_playground_streams_two_answers_with_probabilities(
    site: Site, signed_in: Callable[..., Window]
) -> None:
    window = signed_in()
    window("goto", f"{site.url}/playground?checkpoint=tinker://{site.runs['first']}/sampler_weights/keep")
    window("click", "input[value=completion]")
    window("fill", "textarea", "The capital of France is")
    window("fill", "[name=max_tokens]", "12")
    window("click", "#send")
    for side in "ab":
        window("until", f"document.querySelectorAll('[data-side={side}] [data-answer] span').length === 12")
        window(
            "until",
            f"/12 tokens in/.test(document.querySelector('[data-side={side}] [data-state]').textContent)",
        )
    # A token of white space may have no area to point at.
    seen = "return [...document.querySelectorAll('[data-side=b] [data-answer] span')].findIndex((each) => each.textContent.trim())"
    place = window("evaluate", seen) + 1
    assert place > 0
    window("hover", f"[data-side=b] [data-answer] span:nth-child({place})")
    assert window(
        "until", "!document.getElementById('tip').hidden && document.getElementById('tip').rows?.length !== 0"
    )
    assert "%" in window("evaluate", "return document.getElementById('tip').textContent")
    assert window("messages") == []


def test_a_checkpoint_is_deleted_after_a_question(site: Site, signed_in: Callable[..., Window]) -> None:
    window = signed_in()
    run_id = site.runs["first"]
    window("goto", site.page("first"))
    row = f'[data-checkpoint="tinker://{run_id}/sampler_weights/drop"]'
    window("click", f"{row} [data-action=delete]")
    window("until", "document.getElementById('ask').open")
    window("press", "Escape")  # nothing happens
    window("until", "!document.getElementById('ask').open")
    assert site.engine.store.checkpoints.get(run_id, "sampler_weights", "drop") is not None
    window("click", f"{row} [data-action=delete]")
    window("click", "#ask-yes")
    window("until", f"document.readyState === 'complete' && document.querySelector('{row}') === null")
    assert site.engine.store.checkpoints.get(run_id, "sampler_weights", "drop") is None


def test_the_trace_and_a_checkpoint_are_downloaded(site: Site, signed_in: Callable[..., Window]) -> None:
    window = signed_in()
    window("goto", site.page("second"))
    name, size = window("download", "[data-trace]")
    assert (name[:6], name[-5:], size > 500) == ("trace-", ".json", True)
    row = f'[data-checkpoint="tinker://{site.runs["second"]}/sampler_weights/keep"]'
    name, size = window("download", f"{row} [download]")
    assert (name, size > 10_000) == ("keep.tar", True)
    assert window("url") == site.page("second")  # still there
    assert window("messages") == []


def test_another_user_s_run_is_not_there(site: Site, signed_in: Callable[..., Window]) -> None:
    window = signed_in("tml-bob")
    window("goto", f"{site.url}/runs")
    found = window(
        "evaluate", "return [...document.querySelectorAll('input[name=run]')].map((box) => box.value)"
    )
    assert found == [site.runs["bob"]]
    assert window("goto", site.page("first")) == 404
    assert "that you can see" in window(
        "evaluate", "return document.querySelector('[role=alert]').textContent"
    )


ATTACK = """
const site = "%s", run = "%s", found = {};
const attempt = async (name, url, options) => {
  try { const reply = await fetch(site + url, {credentials: "include", ...options}); found[name] = `${reply.type} ${reply.status}`; }
  catch { found[name] = "blocked"; }
};
await attempt("read", "/runs", {});
await attempt("simple read", "/runs", {mode: "no-cors"});
await attempt("delete", `/dashboard/api/v1/training_runs/${run}/checkpoints/sampler_weights/keep`, {method: "DELETE"});
await attempt("sign out", "/sign-out", {method: "POST", mode: "no-cors", body: new URLSearchParams({a: "b"})});
const script = document.createElement("script");
script.src = site + "/dashboard/series?metric=logged/loss&run=" + run;
found.script = await new Promise((done) => { script.onload = () => done("loaded"); script.onerror = () => done("blocked"); document.body.append(script); });
const frame = document.createElement("iframe");
await new Promise((done) => { frame.onload = done; frame.src = site + "/runs"; document.body.append(frame); });
try { found.frame = frame.contentDocument.body.textContent; } catch { found.frame = "blocked"; }
return found;
"""


def test_a_page_of_another_port_of_this_machine_reaches_nothing(
    site: Site, pages: int, signed_in: Callable[..., Window]
) -> None:
    """Such a page is of the same site, so the browser sends it the strict cookie: the server itself must reject it."""
    window = signed_in()
    window("goto", f"http://127.0.0.1:{pages}/")
    found = window("evaluate", ATTACK % (site.url, site.runs["first"]))
    assert found.pop("frame") in {"blocked", None}
    assert found == dict.fromkeys(("read", "simple read", "delete", "sign out", "script"), "blocked")
    assert site.engine.store.checkpoints.get(site.runs["first"], "sampler_weights", "keep") is not None
    assert window("goto", f"{site.url}/runs") == 200  # still signed in


def test_a_revoked_key_ends_an_open_page(site: Site, signed_in: Callable[..., Window]) -> None:
    key, row = site.engine.store.users.create_key("carol", time.time())
    window = signed_in(key)
    site.engine.store.users.revoke(row.key_id, time.time())
    window("until", "/has been revoked/.test(document.querySelector('[role=alert]')?.textContent ?? '')")


CHECK_PAGE = r"""
const problems = [];
if (document.documentElement.scrollWidth > innerWidth) problems.push("wider than the window: " + document.documentElement.scrollWidth);
const named = (e) => e.getAttribute("aria-label") || e.textContent.trim() || e.title || e.closest("label")?.textContent.trim();
for (const each of document.querySelectorAll("input:not([type=hidden]), select, textarea, button, a[href], figure")) {
  if (each.offsetParent !== null && !named(each)) problems.push("no name: " + each.outerHTML.slice(0, 120));
}
const numbers = (text) => text.match(/[\d.]+/g).map(Number);
const light = ([r, g, b]) => { const [x, y, z] = [r, g, b].map((c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; }); return 0.2126 * x + 0.7152 * y + 0.0722 * z; };
const backOf = (e) => { for (let at = e; at; at = at.parentElement) { const c = numbers(getComputedStyle(at).backgroundColor); if (c.length === 3 || c[3] === 1) return c; } return [255, 255, 255]; };
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const parent = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || parent.offsetParent === null || parent.closest(":disabled, script, option")) continue;
  const [one, two] = [light(numbers(getComputedStyle(parent).color)), light(backOf(parent))];
  const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
  if (ratio < 4.5) problems.push(`contrast ${ratio.toFixed(2)}: ${walker.currentNode.textContent.trim().slice(0, 40)}`);
}
if (document.querySelectorAll("h1").length !== 1) problems.push("not one h1");
if (!document.documentElement.lang) problems.push("no language");
return problems;
"""


@pytest.mark.parametrize(
    ("width", "scheme"), [(400, "light"), (400, "dark"), (1600, "light"), (1600, "dark")]
)
def test_every_page_fits_is_named_and_has_contrast(
    site: Site, signed_in: Callable[..., Window], width: int, scheme: str
) -> None:
    window = signed_in(width=width, scheme=scheme)
    runs = "&".join(f"run={quote(site.runs[name])}" for name in ("first", "second"))
    addresses = [
        "/", "/runs", f"/runs/{quote(site.runs['first'])}", f"/runs/{quote(site.runs['first'])}/rollouts",
        f"/compare?{runs}", "/playground", "/checkpoints", "/usage", "/runs/no-such-run", "/sign-in",
    ]  # fmt: skip
    for address in addresses:
        window("goto", f"{site.url}{address}")
        if "/runs/" in address or address.startswith("/compare"):
            window("until", "!document.getElementById('charts') || document.querySelector('canvas') !== null")
        assert window("evaluate", CHECK_PAGE) == [], address
    assert window("messages") == [NOT_FOUND]
