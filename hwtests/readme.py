"""What readme.sh runs: the blocks of pages, and the comparison of their output with what the page shows."""

import dataclasses
import fcntl
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK_S = 300  # for a block to end
READY_S = 120  # for a server to say that it is ready
INSTALL_S = 3600
STOP_S = 30  # for a server to end once it is told to


@dataclasses.dataclass
class Block:
    """A block of commands, and the page's instructions for it."""

    place: str
    commands: str
    shown: list[str]
    skip: str | None = None
    until: str | None = None
    install: bool = False
    fetch: str | None = None


def blocks(page):
    """The blocks of a page in their order."""
    found, fence, told, last = [], None, None, None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if fence is None:
            opening = re.fullmatch(r"\s*```(\w*)\s*", line)
            comment = re.fullmatch(r"\s*<!-- run: (\w+)(?:, (.*))? -->\s*", line)
            if opening:
                fence, kind, lines = number, opening[1], []
            elif comment:
                told = comment
            elif line.strip():
                last = None  # output follows its commands directly
                if told:
                    raise SystemExit(f"readme: {page}:{number}: no block follows the comment")
        elif line.strip() == "```":
            if kind == "sh":
                last = Block(f"{page.name}:{fence}", "\n".join(lines), [])
                tell(last, told)
                found.append(last)
                told = None
            elif kind == "text" and last:
                last.shown = [shown for shown in lines if shown.strip(" .")]
            fence = None
        else:
            lines.append(line)
    return found


def tell(block, told):
    """Notes what the comment before a block says."""
    what, rest = (told[1], told[2]) if told else (None, None)
    if what == "skip" and rest:
        block.skip = rest
    elif what == "server" and rest and rest.startswith("until "):
        block.until = rest.removeprefix("until ")
    elif what == "install" and not rest:
        block.install = True
    elif what == "fetch" and rest:
        block.fetch = rest
    elif told:
        raise SystemExit(f"readme: {block.place}: unknown comment '{told[0].strip()}'")


def pattern(shown):
    """A shown line as a pattern: any number for a number, any text for `...`, any space for spaces."""
    number = r"\d+(?:[.,]\d+)*"

    def as_pattern(piece):
        if "..." in piece:
            return ".*"
        if piece.isspace():
            return r"\s+"
        return number if piece[:1].isdigit() else re.escape(piece)

    pieces = re.split(rf"(\s*\.\.\.\s*|{number}|\s+)", shown.strip())
    return re.compile("".join(as_pattern(piece) for piece in pieces if piece))


def missing(shown, output):
    """The first shown line that the output lacks at its place."""
    lines = iter(output.splitlines())
    return next((line for line in shown if not any(pattern(line).search(real) for real in lines)), None)


class Page:
    """The runs of a page's blocks."""

    def __init__(self, page, program, with_install):
        self.page = page
        self.with_install = with_install
        self.absent = []  # downloads that are not there, in lower case
        self.work = ROOT / "target" / "readme" / page.stem
        shutil.rmtree(self.work, ignore_errors=True)
        home, bin_ = self.work / "home", self.work / "install" / "bin"
        (self.work / "run").mkdir(parents=True)
        home.mkdir()
        bin_.mkdir(parents=True)
        if not with_install:
            (bin_ / "mixfleet").symlink_to(program)
        self.env = os.environ | {
            "PATH": f"{bin_}:{os.environ['PATH']}",
            "CARGO_INSTALL_ROOT": str(bin_.parent),
            "XDG_CACHE_HOME": str(home / "cache"),
            "XDG_DATA_HOME": str(home / "data"),
        }
        self.servers = []

    def start(self, block, log):
        at = ROOT if block.install else self.work / "run"
        shell = ["bash", "-euo", "pipefail", "-c", block.commands]
        return subprocess.Popen(
            shell,
            cwd=at,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def skips(self, block):
        """Why a block is not run, if it is not. A download is linked from target/real."""
        if block.fetch:
            fetched = ROOT / "target" / "real" / block.fetch
            if fetched.is_dir():
                (self.work / "run" / block.fetch).symlink_to(fetched)
                return f"target/real has {block.fetch} (hwtests/real.sh downloads it)"
            self.absent.append(block.fetch.lower())
            return f"no {block.fetch} in target/real; hwtests/real.sh downloads it"
        if any(name in block.commands.lower() for name in self.absent):
            return "needs a download that is absent"
        if block.install and not self.with_install:
            return "builds for minutes; --install runs it"
        return block.skip

    def run(self, block, number):
        """The fault of a block, if any."""
        path = self.work / f"{number}.log"
        with path.open("wb") as log:
            process = self.start(block, log)
        ended = lambda: process.poll() is not None
        said = lambda: path.read_text(errors="replace")
        if block.until:
            self.servers.append((block, process))
            wait(lambda: ended() or block.until in said(), READY_S)
            if ended() or block.until not in said():
                return f"did not print '{block.until}' within {READY_S} s", said()
        else:
            wait(ended, INSTALL_S if block.install else BLOCK_S)
            if not ended():
                os.killpg(process.pid, signal.SIGKILL)
                return "did not end", said()
            if process.returncode != 0:
                return f"ended with status {process.returncode}", said()
        lacking = missing(block.shown, said())
        return (f"no line like '{lacking}' at its place in the output", said()) if lacking else None

    def stop(self):
        """Ends the servers; returns the fault of their exit, if any."""
        for block, process in self.servers:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                wait(lambda: process.poll() is not None, STOP_S)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                yield f"{block.place}: the server did not end within {STOP_S} s of an interrupt"
            process.wait()


def wait(done, seconds):
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until:
        time.sleep(0.1)


def check(path, program, with_install):
    """Runs a page, and says how its blocks ended. Whether all passed."""
    page = Page(path, program, with_install)
    failed = []
    try:
        for number, block in enumerate(blocks(path)):
            began = time.monotonic()
            if why := page.skips(block):
                print(f"SKIPPED: readme: {block.place}: {why}", flush=True)
                continue
            wrong = page.run(block, number)
            print(f"{'FAILED' if wrong else 'passed'}  {block.place}  {time.monotonic() - began:.1f} s", flush=True)
            if wrong:
                why, output = wrong
                failed.append(f"{block.place}: {why}")
                print(f"  {why}\n{block.commands}\n--- output ---\n{output[-4000:]}\n---", flush=True)
    finally:
        failed += page.stop()
    for line in failed:
        print(f"FAILED: readme: {line}", file=sys.stderr)
    return not failed


def loopback_up():
    """Turns the loopback interface of a new network on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", 1)  # IFF_UP
        try:
            fcntl.ioctl(any_socket, 0x8914, request)  # SIOCSIFFLAGS
        except PermissionError:
            pass  # the host's own network, where it is on


PLANTED = """
```sh
echo a 1.5 b; false
```
```sh
echo a 1.5 b
```
```text
a 27 c
```
<!-- run: skip, it cannot be run -->
```sh
false
```
<!-- run: fetch, a-nonesuch -->
```sh
false
```
```sh
cat A-Nonesuch
```
<!-- run: server, until ready -->
```sh
echo gone
```
<!-- run: server, until ready -->
```sh
echo ready; exec sleep 600
```
```sh
echo first; echo "a 1.5 b, and c"; echo last
```
```text
first
...
a 27 b ... c
last
```
"""


def self_test():
    """Whether a page of planted faults fails where it must, and only there."""
    path = ROOT / "target" / "readme-self-test.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(PLANTED)
    page = Page(path, pathlib.Path("/bin/true"), False)
    try:
        found = [page.skips(block) or page.run(block, number) for number, block in enumerate(blocks(path))]
    finally:
        stopped = list(page.stop())
    faults = [wrong if wrong is None or isinstance(wrong, str) else wrong[0].split(" '")[0] for wrong in found]
    absent = ["no a-nonesuch in target/real; hwtests/real.sh downloads it", "needs a download that is absent"]
    expected = ["ended with status 1", "no line like", "it cannot be run", *absent, "did not print", None, None]
    if faults != expected or stopped:
        print(f"FAILED: readme: the self-test found {faults} {stopped}, and must find {expected}", file=sys.stderr)
        return 1
    return 0


def main(args):
    if args == ["--self-test"]:
        return self_test()
    with_install = args[:1] == ["--install"]
    program, *pages = args[with_install:]
    loopback_up()
    results = [check(pathlib.Path(page).resolve(), pathlib.Path(program).resolve(), with_install) for page in pages]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
