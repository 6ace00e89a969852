"""The pages that commands write, in a browser; see ../pages.sh."""

import importlib.resources
import json
import pathlib
import random
import subprocess
import sys

from common import check
from playwright.sync_api import sync_playwright

PROGRAM, BROWSER, PAGES = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]).absolute()
CONTRAST = 4.5
TEXT_PX = 10
# what a person sees of a page: name of the picture, width, colours, medium
LOOKS = [("light", 1280, "light", "screen"), ("dark", 1280, "dark", "screen"), ("narrow", 390, "light", "screen"),
         ("narrow-dark", 390, "dark", "screen"), ("print", 794, "light", "print"), ("print-dark", 794, "dark", "print")]

# Runs in the page. Each finding has a short text on where it is; an empty list is a page without findings.
FINDINGS = """
([least, leastText]) => {
  const found = [];
  const where = (element) => `${element.tagName.toLowerCase()} '${(element.textContent || '').trim().slice(0, 40)}'`;
  const shown = (element) => {
    const box = element.getBoundingClientRect();
    return box.width > 0 && box.height > 0 && element.checkVisibility({contentVisibilityAuto: true});
  };
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) found.push(`${root.scrollWidth - root.clientWidth} px wider than the window`);

  // names, and an outline without gaps
  if (!root.lang) found.push('no language');
  if (!document.title.trim()) found.push('no title');
  for (const name of ['main', 'h1']) if (document.querySelectorAll(name).length !== 1) found.push(`not one ${name}`);
  let level = 0;
  for (const heading of document.querySelectorAll('h1,h2,h3,h4,h5,h6')) {
    const own = Number(heading.tagName[1]);
    if (own > level + 1) found.push(`${where(heading)}: level ${own} after ${level}`);
    level = own;
  }
  const ids = [...document.querySelectorAll('[id]')].map((element) => element.id);
  if (new Set(ids).size !== ids.length) found.push('an id twice');
  for (const svg of document.querySelectorAll('svg')) {
    if (svg.getAttribute('role') !== 'img' || !svg.getAttribute('aria-label')) found.push('a chart without a name');
  }
  for (const summary of document.querySelectorAll('summary,a,figcaption,th')) {
    if (!summary.textContent.trim()) found.push(`an empty ${summary.tagName.toLowerCase()}`);
  }
  for (const table of document.querySelectorAll('table')) {
    if (!table.querySelector('th[scope]')) found.push(`${where(table)}: a table without headers`);
  }
  for (const box of document.querySelectorAll('[tabindex]')) {
    if (!box.getAttribute('aria-label') || !box.getAttribute('role')) found.push(`${where(box)}: reached, and nameless`);
  }
  for (const box of document.querySelectorAll('.scroll')) {
    if (box.tabIndex < 0) found.push(`${where(box)}: scrolls, and the keyboard does not reach it`);
  }
  if (document.querySelector('script,[onclick],[onload],img[src^="http"],link')) found.push('something that acts or asks');

  // charts: something is drawn, all of it inside, and its numbers are in a table
  for (const svg of document.querySelectorAll('svg')) {
    if (!shown(svg)) continue;
    const name = svg.getAttribute('aria-label');
    const marks = [...svg.querySelectorAll('polyline,circle:not(.spot),polygon,rect:not(.ground)')];
    const visible = marks.filter((mark) => {
      const style = getComputedStyle(mark), box = mark.getBoundingClientRect();
      const painted = style.fill !== 'none' && style.fill !== 'rgba(0, 0, 0, 0)' || style.stroke !== 'none';
      return painted && box.width + box.height > 0;
    });
    if (!visible.length) found.push(`chart '${name}' is blank`);
    const inWindow = (mark) => mark.getBoundingClientRect().left < root.clientWidth && mark.getBoundingClientRect().right > 0;
    if (visible.length && !visible.some(inWindow)) found.push(`chart '${name}' shows nothing without scrolling`);
    const small = [...svg.querySelectorAll('text')].find((text) => text.getBoundingClientRect().height < leastText);
    if (small && !matchMedia('print').matches) found.push(`chart '${name}': ${where(small)} is too small`);
    const frame = svg.getBoundingClientRect();
    for (const part of svg.querySelectorAll('text,polyline,circle,polygon,rect')) {
      const box = part.getBoundingClientRect();
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
        found.push(`chart '${name}': ${where(part)} is cut off`);
    }
    if (!svg.querySelector('title')) found.push(`chart '${name}' tells no values`);
    const rows = svg.closest('figure')?.querySelectorAll('details.data tbody tr').length;
    if (!rows) found.push(`chart '${name}' has no table`);
  }

  // contrast of text and its ground, as WCAG 2 counts it
  const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parsed = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parsed(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return matchMedia('print').matches || !matchMedia('(prefers-color-scheme: dark)').matches ? [255, 255, 255] : [18, 18, 18];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const seen = new Set();
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !shown(element) || element.tagName === 'title') continue;
    const style = getComputedStyle(element);
    const colour = parsed(element instanceof SVGElement ? style.fill : style.color), behind = ground(element);
    const [high, low] = [light(colour), light(behind)].sort((a, b) => b - a);
    const contrast = (high + 0.05) / (low + 0.05);
    const key = `${colour} on ${behind}`;
    if (contrast < least && !seen.has(key)) {
      seen.add(key);
      found.push(`${where(element)}: contrast ${contrast.toFixed(2)}, ${key}`);
    }
  }
  if (matchMedia('print').matches) {
    for (const details of document.querySelectorAll('details:not(.data):not([open])')) {
      const inside = details.querySelector('table,p');
      if (inside && !shown(inside)) found.push(`${where(details.querySelector('summary'))} is closed in print`);
    }
  }
  return found;
}
"""

# The rules of axe-core, by itself; runs in the page, after its text.
AXE = importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
VIOLATIONS = """
async () => (await axe.run(document, {resultTypes: ['violations']})).violations.map(
  (rule) => `axe ${rule.id}: ${rule.help}: ${rule.nodes.map((node) => node.target.join(' ')).slice(0, 3).join(', ')}`)
"""


def made(words, codes=(0,)):
    done = subprocess.run([PROGRAM, *map(str, words)], capture_output=True, text=True)
    if done.returncode not in codes:
        sys.exit(f"{' '.join(map(str, words))}: status {done.returncode}\n{done.stdout}{done.stderr}")


def reports():
    """Two validations: of this machine's cores, soaked, with a claim far too low, and of a simulated part with faults."""
    part = PAGES / "part.toml"
    made(["validate", "--init-part", part, "--device", "sim:rtx-4090,compute"])
    claim = ('[[claim]]\npoint = "memory_write.256KiB"\nvalue = {}\nunit = "{}"\nat_least = 0.9\nsource = "a test"\n')
    part.write_text('match = { name = "." }\n' + claim.format(1, "MB/s") + claim.format(9000, "TB/s"))
    points = ["memory_read.256KiB", "memory_read.4MiB", "memory_write.256KiB", "gemm.bf16.m1.n256.k2048", "gemm.bf16.m64.n256.k2048"]
    only = ",".join(["l0", "l1.gemm", "l1.attn_decode", "l1.fill", "l2.random", "l5", *(f"l3.{point}" for point in points)])
    common = ["--only", only, "--memory", "2MiB", "--part", part]
    made(["validate", "--device", "cpu", "--soak", "1s", *common, "--out", PAGES / "a"], codes=(1,))
    plan = PAGES / "plan.json"
    rule = {"fault": "bit_flip", "probability": 0.02}
    plan.write_text(json.dumps({"seed": 3, "rules": [rule]}))
    made(["validate", "--device", f"sim:rtx-4090,compute,dilation:1,faults:{plan}", *common, "--out", PAGES / "b"], codes=(1,))
    made(["validate", "diff", PAGES / "a", PAGES / "b", "--html", PAGES / "diff.html"], codes=(1,))
    made(["validate", "--all-devices", "--only", "l1.fill", "--out", PAGES / "all"])
    return [("validate", PAGES / "a/report.html"), ("validate-fail", PAGES / "b/report.html"),
            ("diff", PAGES / "diff.html"), ("all", PAGES / "all/index.html")]


def others():
    """The pages of the other commands."""
    trace = PAGES / "trace.jsonl"
    dice = random.Random(7)
    def line(at):
        tokens = dice.randrange(600, 6000)
        own = range(1000 + at * 16, 1000 + at * 16 + -(-tokens // 512) - 2)
        return {"timestamp": at * 500, "input_length": tokens, "output_length": dice.randrange(20, 400),
                "hash_ids": [0, dice.randrange(1, 40), *own]}

    lines = [line(at) for at in range(200)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fleet = PAGES / "FLEET.toml"
    times = ("{ prefill_s = { overhead = 0.0, per_token = 1e-3, per_token_squared = 0.0 }, "
             "decode_s = { base = 0.02, per_sequence = 0.0, per_kv_token = 1e-5 } }")
    pool = '[[pool]]\nname = "a pool with a rather long name {}"\nusd_per_hour = 1.0\ncache_tokens = 1_000_000\ncalibration = {}\n'
    head = "version = 1\n[model]\nlayers = 32\nkv_bytes_per_token = 131072\n[slo]\nttft_s = 5.0\ntbt_s = 0.1\n"
    fleet.write_text(head + "".join(pool.format(i, times) for i in range(8)))
    html = {name: PAGES / f"{name}.html" for name in ["profile", "compare", "trace", "simulate", "plan", "bench"]}
    some = "launch.empty,memory_*.256KiB,memory_*.4MiB,gemm.bf16.*.n256.k2048,attn_decode.bf16.b1.c512.*"
    made(["profile", "--device", "cpu", "--quick", "--only", some, "--html", html["profile"]])
    made(["compare", "--model", "llama-3.1-8b", "rtx-4090", "l40s", "h100-sxm-80gb", "--html", html["compare"]])
    made(["trace", "stats", trace, "--html", html["trace"]])
    made(["simulate", "--fleet", fleet, "--trace", trace, "--html", html["simulate"]])
    made(["plan", "--model", "llama-3.1-8b", "--rate", "5", "--input-tokens", "1500", "--output-tokens", "150", "--parts",
          "rtx-4090,l40s", "--ttft", "5", "--tbt", "0.1", "--html", html["plan"]])
    made(["bench", "--device", "cpu", "--prompt-tokens", "32", "--answer-tokens", "8", "--clients", "1,2,4,8,16", "--requests", "16",
          "--html", html["bench"]])
    return list(html.items())


def look(playwright, pages):
    browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
    page = browser.new_page()
    asked, wrong = [], 0
    page.on("request", lambda request: asked.append(request.url))
    for name, file in pages:
        page.goto(file.as_uri())
        page.evaluate(AXE)
        for look, width, scheme, medium in LOOKS:
            page.emulate_media(color_scheme=scheme, media=medium)
            page.set_viewport_size({"width": width, "height": 1000})
            page.screenshot(path=PAGES / f"{name}-{look}.png", full_page=True)
            for opened in [False, True] if medium == "screen" else [False]:
                if opened:
                    page.evaluate("document.querySelectorAll('details').forEach((details) => details.open = true)")
                findings = page.evaluate(f"({FINDINGS})({[CONTRAST, TEXT_PX]})") + page.evaluate(VIOLATIONS)
                wrong += len(findings)
                for finding in findings:
                    print(f"FAILED  {name}, {look}: {finding}", flush=True)
            page.evaluate("document.querySelectorAll('details').forEach((details) => details.open = false)")
        print(f"ok      {name}: {len(page.query_selector_all('svg'))} charts", flush=True)
    # small ones for the documentation
    small = browser.new_page(device_scale_factor=0.5)
    small.goto(pages[0][1].as_uri())
    for look, width, scheme, medium in [LOOKS[0], LOOKS[1], LOOKS[4]]:
        small.emulate_media(color_scheme=scheme, media=medium)
        small.set_viewport_size({"width": width, "height": 1000})
        small.screenshot(path=PAGES / f"report-{look}.png", full_page=True, clip={"x": 0, "y": 0, "width": width, "height": 1500})
    check(asked == [file.as_uri() for _, file in pages], "no page requests anything but itself")
    check(not wrong, "nothing is cut off, blank, nameless or pale")
    # the check itself must be able to fail
    page.set_content("<html><body><h3 style='color:#bbb;width:3000px'>pale and wide</h3><svg role='img'></svg></body></html>")
    page.evaluate(AXE)
    planted = page.evaluate(f"({FINDINGS})({[CONTRAST, TEXT_PX]})") + page.evaluate(VIOLATIONS)
    for words in ["wider than", "contrast", "without a name", "no language", "level 3", "axe html-has-lang", "axe color-contrast"]:
        check(any(words in finding for finding in planted), f"a planted mistake is found: {words}")
    browser.close()


with sync_playwright() as playwright:
    look(playwright, reports() + others())
print(f"pages and pictures: {PAGES}")
