#!/usr/bin/env python3
"""Writes the notices of the crates that are in the binary: name, version, licence, and the text of each licence file.

    hwtests/notices.py [--check] [FILE]     to FILE (default standard output); --check only counts

The crates are those of `cargo metadata` that the binary with all features has on Linux, without what only builds or
tests it. A crate whose sources hold no licence file gets the text of its licence with its authors. Exit status: 0
written, 1 a crate has no licence text, 2 usage, 3 could not run.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLATFORM = "x86_64-unknown-linux-gnu"
# Names of files that hold a licence, an author or a notice.
IS_NOTICE = re.compile(r"(li[cs]en[cs]e|copying|copyright|notice|unlicense)", re.IGNORECASE)
# Where the text of a licence is that a crate names and does not hold.
OWN_TEXTS = {"Apache-2.0": "LICENSE-APACHE", "MIT": "LICENSE-MIT"}


def metadata():
    words = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", PLATFORM,
             "--features", "mixfleet/full"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode != 0:
        print(ended.stderr, end="", file=sys.stderr)
        sys.exit(3)
    return json.loads(ended.stdout)


def crates_in_binary(document):
    """The packages from outside that the binary links, by name and version."""
    packages = {package["id"]: package for package in document["packages"]}
    nodes = {node["id"]: node for node in document["resolve"]["nodes"]}
    waiting = [package["id"] for package in packages.values() if package["name"] == "mixfleet"]
    found = set(waiting)
    while waiting:
        for dependency in nodes[waiting.pop()]["deps"]:
            is_linked = any(kind["kind"] is None for kind in dependency["dep_kinds"])
            if is_linked and dependency["pkg"] not in found:
                found.add(dependency["pkg"])
                waiting.append(dependency["pkg"])
    outside = [packages[id] for id in found if packages[id]["source"] is not None]
    return sorted(outside, key=lambda package: (package["name"], package["version"]))


def texts_of(package):
    """The texts of a crate's licence files, or that of the licence that it names."""
    directory = pathlib.Path(package["manifest_path"]).parent
    named = {file for file in directory.iterdir() if file.is_file() and IS_NOTICE.search(file.name)}
    if package["license_file"]:
        named.add(directory / package["license_file"])
    found = [file.read_text(errors="replace").strip() for file in sorted(named) if file.suffix not in (".rs", ".toml")]
    if not found:
        named = re.findall(r"[A-Za-z0-9.-]+", package["license"] or "")
        found = [licence_text(name, package) for name in OWN_TEXTS if name in named][:1]
    return [text for text in found if text]


def licence_text(name, package):
    """The text of a licence, with a crate's authors where it names the holder of the copyright."""
    text = (ROOT / OWN_TEXTS[name]).read_text().strip()
    authors = ", ".join(package["authors"]) or f"the authors of {package['name']}"
    return re.sub(r"^Copyright \(c\) .*$", f"Copyright (c) {authors}", text, flags=re.MULTILINE)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("file", nargs="?")
    arguments = parser.parse_args()
    crates = crates_in_binary(metadata())
    users, missing = {}, []
    lines = ["Crates in the binary of mixfleet, their licences, and below the texts of these.", ""]
    for package in crates:
        name = f"{package['name']} {package['version']}"
        lines.append(f"{name}: {package['license'] or 'see its text'} {package['repository'] or ''}".rstrip())
        texts = texts_of(package)
        if not texts:
            missing.append(name)
        for text in texts:
            users.setdefault(text, []).append(name)
    for text, names in users.items():
        lines += ["", "-" * 80, "Of " + ", ".join(names), "-" * 80, "", text]
    if missing:
        print("notices: no licence text: " + ", ".join(missing), file=sys.stderr)
        sys.exit(1)
    if arguments.check:
        print(f"notices ok: {len(crates)} crates, {len(users)} texts")
    elif arguments.file:
        pathlib.Path(arguments.file).write_text("\n".join(lines) + "\n")
    else:
        print("\n".join(lines))


main()
