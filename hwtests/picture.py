#!/usr/bin/env python3
"""Draws the README's picture: what a mix of parts saves in each planned case, with its error.

    hwtests/picture.py PAGE FILE.svg            draws the first table of PAGE with a column "gain, %"
    hwtests/picture.py --check PAGE FILE.svg README
                                                compares FILE.svg with PAGE, and the numbers in README with PAGE and
                                                with the result pages beside them

Exit status: 0 done, 1 something differs, 2 usage.
"""

import pathlib
import re
import sys

MODELS = {"8b": "Llama-3.1-8B", "70b": "Llama-3.1-70B", "30b-a3b": "Qwen3-30B-A3B"}
TRACES = {
    "azure": "Azure chat",
    "mooncake": "Mooncake chat",
    "servegen-m-large": "ServeGen m-large",
    "servegen-r1": "ServeGen R1",
}
WIDTH, LEFT, ROW, TOP = 760, 310, 22, 46
LOW, HIGH = -60, 80  # percent
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-weight: 600; font-size: 14px }
  .small { font-size: 11px; fill: #57606a }
  .grid { stroke: #d0d7de; stroke-width: 1 }
  .zero { stroke: #57606a; stroke-width: 1.5 }
  .tie { stroke: #8c959f; fill: #8c959f; stroke-width: 2 }
  .beyond { stroke: #0a6640; fill: #0a6640; stroke-width: 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .small { fill: #9198a1 }
    .grid { stroke: #3d444d }
    .zero { stroke: #9198a1 }
    .beyond { stroke: #3fb950; fill: #3fb950 }
  }
"""


def planned(text):
    """How many cases were planned, as the page says it."""
    found = re.search(r"a mix is cheapest in \d+ of (\d+) cells", " ".join(text.split()))
    return int(found[1]) if found else 0


def cells(text):
    """The rows of the first table that has a gain, as dictionaries by column."""
    columns, rows = None, []
    for line in text.splitlines():
        parts = [part.strip() for part in line.strip().strip("|").split("|")] if line.startswith("|") else None
        if columns is None:
            columns = parts if parts and "gain, %" in parts else None
        elif parts is None:
            return rows
        elif not set(parts[0]) <= set("-: "):
            rows.append(dict(zip(columns, parts)))
    return rows


def mixes(rows):
    """The rows in which a mix is cheapest: (name, gain, error, whether the gain is larger). None: no rival."""
    found = []
    for row in rows:
        ttft = row["TTFT, TBT, s"].split(",")[0]
        name = f'{MODELS[row["model"]]}, {TRACES[row["trace"]]}, TTFT {ttft} s'
        gain = re.fullmatch(r"(\**)(-?\d+)\**\s*±\s*(\d+)", row["gain, %"])
        parts = set(re.findall(r"[A-Z][A-Z0-9]*(?:-[A-Z0-9]+)*", row["cheapest fleet"]))
        if gain:
            found.append((name, int(gain[2]), int(gain[3]), bool(gain[1])))
        elif len(parts) > 1:
            found.append((name, None, None, False))
    return sorted(found, key=lambda row: (row[1] is None, -(row[1] or 0)))


def x(percent):
    return LEFT + (WIDTH - LEFT - 20) * (percent - LOW) / (HIGH - LOW)


def label(x, y, text, more=""):
    return f'<text class="small" x="{x:.1f}" y="{y}"{more}>{text}</text>'


def draw(rows, cases):
    found = mixes(rows)
    bottom = TOP + ROW * len(found)
    height = bottom + 58
    alone = cases - len(found)
    said = f"A mix is cheapest in {len(found)} of {cases} planned cases"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{said}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="10" y="20">{said}: rent saved against the best fleet of one part</text>',
    ]
    for percent in range(LOW, HIGH + 1, 20):
        kind = "zero" if percent == 0 else "grid"
        out.append(f'<line class="{kind}" x1="{x(percent):.1f}" y1="{TOP - 10}" x2="{x(percent):.1f}" y2="{bottom}"/>')
        out.append(label(x(percent), bottom + 16, f"{percent} %", ' text-anchor="middle"'))
    for at, (name, gain, error, beyond) in enumerate(found):
        y = TOP + ROW * at + 4
        out.append(f'<text x="10" y="{y + 4}">{name}</text>')
        if gain is None:
            out.append(label(x(0) + 8, y + 4, "no fleet of one part meets the objectives"))
            continue
        kind = "beyond" if beyond else "tie"
        low, high = max(gain - error, LOW), min(gain + error, HIGH)
        out.append(f'<line class="{kind}" x1="{x(low):.1f}" y1="{y}" x2="{x(high):.1f}" y2="{y}"/>')
        out.append(f'<circle class="{kind}" cx="{x(gain):.1f}" cy="{y}" r="4"/>')
    bars = "Bars: likely error of the prediction. Green: the gain is larger than its error."
    out.append(label(10, bottom + 36, bars))
    out.append(label(10, bottom + 51, f"In the other {alone} cases the cheapest fleet is of one part."))
    return "\n".join([*out, "</svg>", ""])


def complaints(rows, cases, svg, readme):
    found = mixes(rows)
    best = max((row for row in found if row[3]), key=lambda row: row[1])
    text = " ".join(pathlib.Path(readme).read_text().split())
    if pathlib.Path(svg).read_text() != draw(rows, cases):
        yield f"{svg} is not what the table gives: run hwtests/picture.py"
    for claim in (f"{len(found)} of {cases} planned cases", f"{best[1]} ± {best[2]} %"):
        if claim not in text:
            yield f"{readme} does not say '{claim}'"


def measured(readme):
    """Numbers of the README's tables that the results page beside them does not have."""
    for line in pathlib.Path(readme).read_text().splitlines():
        row = re.fullmatch(r"\|[^|]*\|([^|]*)\| \[[^]]*\]\((docs/results/[^)]*)\) \|", line)
        page = pathlib.Path(readme).parent / row[2] if row else None
        for number in re.findall(r"\d+(?:[.,]\d+)*", row[1]) if row else []:
            if not re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d])", page.read_text()):
                yield f"{readme}: {number} is not on {row[2]}"


def main(args):
    check = args[:1] == ["--check"]
    if len(args) != (4 if check else 2):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    page, svg = args[1:3] if check else args
    text = pathlib.Path(page).read_text()
    rows, cases = cells(text), planned(text)
    if not rows or not cases:
        print(f"picture: {page} has no table with a column 'gain, %', or no number of cases", file=sys.stderr)
        return 1
    if not check:
        pathlib.Path(svg).write_text(draw(rows, cases))
        return 0
    wrong = [*complaints(rows, cases, svg, args[3]), *measured(args[3])]
    for line in wrong:
        print(f"picture: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
