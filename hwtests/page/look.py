"""The page at / in a browser; see ../page.sh."""

import json
import pathlib
import re
import subprocess
import sys
import time
import urllib.request

from common import WAIT_S, check, free_port
from playwright.sync_api import expect, sync_playwright

PROGRAM, BROWSER, PICTURES = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
KEY = "a key of the page's test"


class Server:
    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"
        devices = ["--device", "cpu@0=prefill", "--device", "cpu@1=decode"]
        prices = ["--usd-per-hour", "cpu@0=0.05", "--usd-per-hour", "cpu@1=0.02"]
        command = [PROGRAM, "serve", "--listen", f"127.0.0.1:{port}", "--api-key", KEY, *devices, *prices]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + WAIT_S
        while True:
            try:
                if urllib.request.urlopen(self.url + "/health").status == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > until:
                sys.exit("mixfleet serve does not start")
            time.sleep(0.05)

    def ask(self):
        body = {"model": "mixfleet-random", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        asked = urllib.request.Request(self.url + "/v1/chat/completions", json.dumps(body).encode(), headers)
        urllib.request.urlopen(asked).read()

    def kill(self):
        self.process.kill()
        self.process.wait()


def overflows(page):
    """Whether the page is wider than its window: only boxes with their own scroll bar may be."""
    return page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


def numbers(row):
    return [cell for cell in row.locator("td").all_inner_texts()[1:] if re.search(r"\d", cell)]


def look(playwright, server, port):
    browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
    context = browser.new_context(viewport={"width": 1280, "height": 1000}, color_scheme="light")
    page = context.new_page()
    wrong, asked = [], []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url + "/")
    state = page.get_by_role("status")
    expect(state).to_have_text("healthy", timeout=WAIT_S * 1000)
    expect(page.locator("#placements-say")).to_have_text("an API key is needed for this", timeout=WAIT_S * 1000)
    check(True, "without the key it shows the public parts, and names the others")

    page.get_by_label("API key").fill(KEY)
    for _ in range(5):
        server.ask()
    placed = page.locator("#placements tbody tr")
    expect(placed).to_have_count(5, timeout=WAIT_S * 1000)
    rows = page.locator("#devices tbody tr")
    expect(rows).to_have_count(2)
    expect(page.locator("#dollars")).to_contain_text("$ per million generated tokens", timeout=WAIT_S * 1000)
    check([row.locator("td").first.inner_text() for row in rows.all()] == ["cpu@0", "cpu@1"], "each device has a row")
    check(all(len(numbers(row)) >= 6 for row in rows.all()), "with numbers")
    placed.first.get_by_role("button").click()
    expect(page.locator("#why tbody tr")).to_have_count(1)
    expect(page.locator("#why tbody tr").first).to_contain_text("chosen")
    check(True, "a placement is explained, candidate by candidate")

    page.get_by_label("Message").fill("Hello")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#said")).not_to_have_text("", timeout=WAIT_S * 1000)
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=WAIT_S * 1000)
    faults = page.locator("#said .bad").all_inner_texts()
    check(not faults, f"the chat answers {faults or ''}".rstrip())

    for name, width, scheme in [("light", 1280, "light"), ("dark", 1280, "dark"), ("narrow", 390, "light")]:
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 1000})
        page.screenshot(path=PICTURES / f"page-{name}.png", full_page=True)
        check(not overflows(page), f"{name}: nothing is wider than the window")
    page.set_viewport_size({"width": 1280, "height": 1000})

    server.kill()
    expect(state).to_have_text("no answer from the server; trying again", timeout=WAIT_S * 1000)
    check(True, "a lost server is reported")
    again = Server(port)
    try:
        expect(state).to_have_text("healthy", timeout=WAIT_S * 1000)
        expect(page.locator("#placements-say")).to_have_text("No request has been placed yet.", timeout=WAIT_S * 1000)
        check(True, "a server that is back is shown, without its earlier history")
        check(all(url.startswith(server.url + "/") for url in asked), "no request to another server")
        check(not wrong, f"the page's script had no error {wrong}")
    finally:
        again.kill()
    browser.close()


port = free_port()
server = Server(port)
try:
    with sync_playwright() as playwright:
        look(playwright, server, port)
finally:
    server.kill()
print(f"pictures: {PICTURES}")
