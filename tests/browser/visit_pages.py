"""Opens pages in Chromium; runs in Playwright's own environment. Reads what to do on stdin, prints what happened."""

from __future__ import annotations

import json
import sys

from playwright.sync_api import sync_playwright

order = json.load(sys.stdin)
visited = []
with sync_playwright() as playwright:
    context = playwright.chromium.launch_persistent_context(
        order["profile"], executable_path=order["executable"], headless=True, args=order["flags"]
    )
    for url, script in order["visits"]:
        page = context.new_page()
        response = page.goto(url)
        visited.append((response.status, page.evaluate(script)))
        page.close()
    context.close()
print(json.dumps(visited))
