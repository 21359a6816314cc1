"""Drives Chromium for a test in another process; runs in Playwright's own environment.

Reads one order per line on stdin, and prints its result: a JSON list of the name of a command and its arguments.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from playwright.sync_api import Error, Page, sync_playwright

TIMEOUT_MS = 60_000
POLL_S = 0.02


class Driver:
    """One browser; each test opens a window of its own, with cookies of its own."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._page: Page | None = None
        self._messages: list[str] = []

    @property
    def page(self) -> Page:
        assert self._page is not None, "a window is open"
        return self._page

    def window(self, width: int, height: int, scheme: str) -> None:
        if self._page is not None:
            self._page.context.close()
        context = self._browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, accept_downloads=True
        )
        context.set_default_timeout(TIMEOUT_MS)
        self._page = context.new_page()
        self._messages = []
        self._page.on("pageerror", lambda error: self._messages.append(str(error)))
        self._page.on(
            "console",
            lambda message: self._messages.append(message.text) if message.type == "error" else None,
        )

    def goto(self, url: str) -> int:
        response = self.page.goto(url)
        return response.status if response is not None else 0

    def url(self) -> str:
        return self.page.url

    def messages(self) -> list[str]:
        """Errors of the page since the last call, such as violations of its Content-Security-Policy."""
        found, self._messages = self._messages, []
        return found

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def type(self, text: str) -> None:
        self.page.keyboard.type(text)

    def click(self, selector: str) -> None:
        self.page.click(selector)

    def fill(self, selector: str, text: str) -> None:
        self.page.fill(selector, text)

    def choose(self, selector: str, value: str) -> None:
        self.page.select_option(selector, value)

    def hover(self, selector: str) -> None:
        self.page.hover(selector)

    def drag(self, selector: str, start: float, stop: float) -> None:
        """Drags horizontally over an element, between two parts of its width."""
        box = self.page.locator(selector).bounding_box()
        assert box is not None
        middle = box["y"] + box["height"] / 2
        self.page.mouse.move(box["x"] + start * box["width"], middle)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + stop * box["width"], middle, steps=5)
        self.page.mouse.up()

    def download(self, selector: str) -> tuple[str, int]:
        with self.page.expect_download() as started:
            self.page.click(selector)
        file = started.value.path()
        return started.value.suggested_filename, file.stat().st_size

    def evaluate(self, script: str) -> Any:
        return self.page.evaluate(f"async () => {{ {script} }}")

    def until(self, expression: str) -> Any:
        """Waits until an expression is true, also over a navigation; returns its value."""
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        problem: object = None
        while time.monotonic() < deadline:
            try:
                problem = value = self.page.evaluate(f"() => ({expression})")
                if value:
                    return value
            except Error as error:  # the page is being left
                problem = error
            time.sleep(POLL_S)
        raise AssertionError(f"never true: {expression} (last: {problem})")

    def screenshot(self, path: str) -> None:
        self.page.screenshot(path=path)


with sync_playwright() as playwright:
    executable, *flags = sys.argv[1:]
    driver = Driver(playwright.chromium.launch(executable_path=executable, headless=True, args=flags))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            result = ["done", getattr(driver, name)(*arguments)]
        except (AssertionError, Error) as error:
            result = ["failed", str(error)]
        print(json.dumps(result), flush=True)
