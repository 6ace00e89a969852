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


DEVICES = ["--device", "cpu@0=prefill", "--device", "cpu@1=decode", "--usd-per-hour", "cpu@0=0.05", "--usd-per-hour", "cpu@1=0.02"]

# whether the drawing of the fleet has been made again for the width of the window
FLEET_FITS = "document.querySelector('#fleet svg').viewBox.baseVal.width <= document.querySelector('#fleet').clientWidth + 1"

# Runs in the page. Drawings without a visible mark inside their view box, and marks outside of it.
UNMARKED = """
() => [...document.querySelectorAll('svg')].filter((svg) => svg.getBoundingClientRect().width > 0).flatMap((svg) => {
  const frame = svg.getBoundingClientRect(), name = svg.getAttribute('aria-label'), found = [];
  if (svg.getAttribute('role') !== 'img' || !name) found.push('a drawing without a name');
  const boxes = [...svg.querySelectorAll('polyline,rect,path,text')].map((mark) => mark.getBoundingClientRect());
  if (!boxes.some((box) => box.width + box.height > 0)) found.push(`${name}: blank`);
  if (boxes.some((box) => box.left < frame.left - 2 || box.right > frame.right + 2 || box.top < frame.top - 2 || box.bottom > frame.bottom + 2))
    found.push(`${name}: cut off`);
  return found;
})
"""


class Server:
    def __init__(self, port, *words):
        self.url = f"http://127.0.0.1:{port}"
        self.address = f"127.0.0.1:{port}"
        command = [PROGRAM, "serve", "--listen", self.address, *(words or ("--api-key", KEY, *DEVICES))]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + WAIT_S
        while True:
            try:
                if urllib.request.urlopen(self.url + "/health").status == 200:
                    return
            except OSError:  # also of a server that is not ready
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


def say(page, text):
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def chat(page, sent):
    """Two messages and a stopped one: each is sent with what was said before."""
    turns = page.locator("#said .turn.assistant")
    for count, text in [(1, "Hello"), (2, "And <b>again</b>")]:
        say(page, text)
        expect(turns.nth(count - 1).locator("footer")).to_contain_text("tokens/s", timeout=WAIT_S * 1000)
        expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=WAIT_S * 1000)
    faults = page.locator("#said .bad").all_inner_texts()
    check(not faults, f"the chat answers {faults or ''}".rstrip())
    roles = [[message["role"] for message in body["messages"]] for body in sent]
    check(roles == [["user"], ["user", "assistant", "user"]], f"with what was said before: {roles}")
    expect(turns.first.locator("footer")).to_contain_text("cpu@0 \u2192 cpu@1", timeout=WAIT_S * 1000)
    expect(turns.first.locator("footer")).to_contain_text("mixfleet-random")
    check(page.locator("#said b").count() == 0, "text stays text, with the answer's model and placement")
    say(page, "And once more")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=WAIT_S * 1000)
    page.get_by_role("button", name="New conversation").click()
    check(turns.count() == 0, "an answer is stopped, and a conversation begun anew")
    say(page, "Hello")
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=WAIT_S * 1000)
    check([message["role"] for message in sent[-1]["messages"]] == ["user"], "without what was said before")


def lost_engines(playwright):
    """A gateway with two engines, of which one is killed and comes back, and then both are killed."""
    ports = [free_port() for _ in range(2)]
    plain = ["--device", "cpu", "--kv-memory", "0.02"]
    engines = [Server(port, *plain) for port in ports]
    gateway = Server(free_port(), *(f"--worker-engine=mixfleet:{engine.url}" for engine in engines))
    browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    try:
        page.goto(gateway.url + "/")
        state, rows = page.get_by_role("status"), page.locator("#devices tbody tr")
        expect(state).to_have_text("healthy", timeout=WAIT_S * 1000)
        expect(rows).to_have_count(2)
        engines[0].kill()
        lost = rows.filter(has_text=engines[0].address)
        expect(lost.locator(".badge")).to_have_text("down", timeout=WAIT_S * 1000)
        expect(state).to_have_text("1 of 2 down", timeout=WAIT_S * 1000)
        expect(page.locator("#reasons")).to_contain_text(engines[0].address, timeout=WAIT_S * 1000)
        reason = page.locator("#reasons").inner_text()
        check(not numbers(lost), f"a killed engine is down and shows no numbers: {reason}")
        page.screenshot(path=PICTURES / "page-down.png", full_page=True)
        engines[0] = Server(ports[0], *plain)
        expect(state).to_have_text("healthy", timeout=WAIT_S * 1000)
        expect(page.locator("#reasons li")).to_have_count(0, timeout=WAIT_S * 1000)
        check(True, "and healthy once it is back")
        for engine in engines:
            engine.kill()
        expect(state).to_have_text("nothing can serve: 2 of 2 down", timeout=WAIT_S * 1000)
        say(page, "Hello")
        told = page.locator("#said .bad")
        expect(told).to_contain_text("no engine answers: ", timeout=WAIT_S * 1000)
        check("is down for" in told.inner_text(), f"the chat says why: {told.inner_text()}")
    finally:
        browser.close()
        for server in [gateway, *engines]:
            server.kill()


def look(playwright, server, port):
    browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
    context = browser.new_context(viewport={"width": 1280, "height": 1000}, color_scheme="light")
    page = context.new_page()
    wrong, asked = [], []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    sent = []
    page.on("request", lambda request: request.method == "POST" and sent.append(request.post_data_json))
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
    states = [row.locator(".badge").inner_text() for row in rows.all()]
    check(states == ["healthy", "healthy"], f"and a state: {states}")
    prices = [row.locator("td").nth(10).inner_text() for row in rows.all()]
    check(prices == ["0.05", "0.02"], f"and the price that it was given: {prices}")
    placed.first.get_by_role("button").click()
    expect(page.locator("#why tbody tr")).to_have_count(1)
    expect(page.locator("#why tbody tr").first).to_contain_text("chosen")
    check(True, "a placement is explained, candidate by candidate")

    expect(page.locator("#phases svg")).to_have_attribute("aria-label", re.compile("measured: .*prefill .*predicted: "))
    check(True, "its phases are drawn, measured and predicted")
    expect(page.locator("#fleet svg")).to_have_attribute("aria-label", "fleet of 2 with 1 KV links in use")
    expect(page.locator("#sparks polyline")).not_to_have_count(0, timeout=WAIT_S * 1000)
    check(page.locator("#sparks svg").count() == 4, "the last minutes are drawn")
    chat(page, sent)

    for name, width, scheme in [("light", 1280, "light"), ("dark", 1280, "dark"), ("narrow", 390, "light"), ("narrow-dark", 390, "dark")]:
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 1000})
        end = time.monotonic() + WAIT_S
        while not page.evaluate(FLEET_FITS) and time.monotonic() < end:
            page.wait_for_timeout(50)
        page.screenshot(path=PICTURES / f"page-{name}.png", full_page=True)
        check(not overflows(page), f"{name}: nothing is wider than the window")
        faults = page.evaluate(UNMARKED)
        check(not faults, f"{name}: every drawing shows something, inside its frame {faults or ''}".rstrip())
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
        lost_engines(playwright)
finally:
    server.kill()
print(f"pictures: {PICTURES}")
