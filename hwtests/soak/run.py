"""Soaks a server with good and hostile clients, and reports the outcome."""

import argparse
import asyncio
import json
import multiprocessing
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time

import fleet
import good
import hostile
import watch

OPEN_FILES = 1024
# Requirements of a soak.
RSS_MB_PER_MINUTE_MAX = 1.0
RSS_AFTER_MINUTES = 10
LIVE_OWN_P99_MS_MAX = 50
LIVE_SHARED_P99_MS_MAX = 250
DRAIN_S = 20
START_S_MAX = 120
SETTLE_S_MAX = 90


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--out")
    parser.add_argument("--fleet", action="store_true")
    return parser.parse_args()


def keys_file(directory):
    keys = directory / "keys.toml"
    keys.write_text("".join(f'[[tenant]]\nname = "{name}"\nkey = "{name}-key"\nrequests = {requests}\n' for name, requests in (("good", 400), ("hostile", 32))))
    keys.chmod(0o600)
    return keys


class Server:
    """`mixfleet serve` and where it answers."""

    def __init__(self, binary, directory, keys):
        self.log = directory / "serve.log"
        command = [binary, "serve", "--listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0", "--api-keys", str(keys)]
        command += ["--device", "cpu@0=prefill", "--device", "cpu@1=decode", "--kv-memory", "0.05", "--kv-dram", "0.05"]
        command += ["--drain-s", str(DRAIN_S), "--json"]
        limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stderr=log, preexec_fn=limit, env=fleet.environment(directory))
        self.shared = self.own = None
        deadline = time.monotonic() + START_S_MAX
        while self.shared is None or self.own is None:
            text = self.log.read_text(errors="replace")
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{text[-4000:]}")
            # the own address is said before the model is loaded, the shared one is ready after
            own = re.search(r'answers /live[^\n]*?"address":"([^"]+)"|"address":"([^"]+)"[^\n]*answers /live', text)
            ready = re.search(r"ready: http://([^/]+)/v1", text)
            self.own = address(own and (own[1] or own[2]))
            self.shared = address(ready and ready[1])
            time.sleep(0.1)

    def pids(self):
        return [self.process.pid]

    def panics(self):
        return self.log.read_text(errors="replace").count("panicked at")

    def end(self):
        """Tells it to end; the exit code, or None if it had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=DRAIN_S + 30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None


def address(text):
    host, _, port = (text or "").rpartition(":")
    return (host, int(port)) if host else None


async def soak(server, options, report):
    cases = await good.cases(server.shared)
    # all that is made once is made now: the ways between the devices, the pool's threads
    await asyncio.gather(*(good.once(server.shared, case, report) for case in cases * 4))
    await asyncio.sleep(2)
    report.start = watch.sample(server.pids())
    stop = asyncio.Event()
    well_meant = max(1, options.clients * 3 // 5)
    clients = [good.client(server.shared, cases, number, report, stop) for number in range(well_meant)]
    clients += [hostile.client(server.shared, number, report, stop) for number in range(options.clients - well_meant)]
    clients += [hostile.holder(server.shared, kind, stop, report) for kind in hostile.HOLDERS]
    tasks = [asyncio.create_task(client) for client in clients]
    sampling = asyncio.create_task(watch.samples(server.pids(), report, stop))
    began = time.monotonic()
    while time.monotonic() - began < options.minutes * 60 and server.process.poll() is None:
        await asyncio.sleep(1)
    stop.set()
    done, late = await asyncio.wait(tasks, timeout=good.PATIENCE_S + 30)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await sampling
    report.late_clients = len(late)
    report.broken_clients = [repr(task.exception()) for task in done if not task.cancelled() and task.exception()]
    # a dropped connection is noticed soon
    deadline = time.monotonic() + SETTLE_S_MAX
    while server.process.poll() is None:
        report.end = watch.sample(server.pids())
        if report.end["descriptors"] <= report.start["descriptors"] or time.monotonic() > deadline:
            break
        await asyncio.sleep(1)
    if server.process.poll() is None:
        report.health = await good.status(server.own, "/health")
        await asyncio.gather(*(good.once(server.shared, case, report) for case in cases))
        report.left_open = watch.descriptors(server.pids())


class Report:
    """What happened."""

    def __init__(self):
        self.statuses, self.good, self.wrong, self.broken = {}, {}, [], []
        self.series, self.start, self.end, self.health, self.left_open = [], None, None, None, []
        self.late_clients, self.broken_clients, self.panics = 0, [], 0

    def count(self, kind, outcome):
        of = self.statuses.setdefault(kind, {})
        of[str(outcome)] = of.get(str(outcome), 0) + 1


def judge(report, live, options, exit_code):
    """The requirements, and whether each held; None if the run is too short to tell."""
    slope = watch.slope(report.series, "rss_mb", RSS_AFTER_MINUTES)
    each = [watch.slope(report.series, "rss_mb_of_each", RSS_AFTER_MINUTES, of) for of in range(len(report.start["rss_mb_of_each"]))]
    answered = report.statuses.get("good", {}).get("whole", 0)
    own, shared = live["own"], live["shared"]
    checks = {
        "the server lived, and exited with 0 on request": exit_code == 0,
        "every good answer is whole and equal to the one given alone": not report.wrong and not report.broken and answered > 0,
        "no thread panicked": report.panics == 0,
        "no client waited for ever": report.late_clients == 0 and not report.broken_clients,
        "healthy at the end": report.health == 200,
        f"RSS slope after minute {RSS_AFTER_MINUTES} below {RSS_MB_PER_MINUTE_MAX} MB a minute": None if slope is None else slope < RSS_MB_PER_MINUTE_MAX,
        "descriptors at the end as at the start": bool(report.end) and report.end["descriptors"] <= report.start["descriptors"],
        f"/live on its own listener: p99 below {LIVE_OWN_P99_MS_MAX} ms, none lost": own["p99_ms"] < LIVE_OWN_P99_MS_MAX and own["failed"] == 0,
        f"/live on the shared port: p99 below {LIVE_SHARED_P99_MS_MAX} ms, none lost": shared["p99_ms"] < LIVE_SHARED_P99_MS_MAX and shared["failed"] == 0,
    }
    return {
        "schema": "mixfleet.soak/1", "minutes": options.minutes, "clients": options.clients, "cores": os.cpu_count(),
        "checks": checks, "passed": all(held is not False for held in checks.values()), "exit_code": exit_code,
        "rss_slope_mb_per_minute": slope, "rss_slope_of_each_mb_per_minute": each, "rss_slope_of_all_mb_per_minute": watch.slope(report.series, "rss_mb", 0),
        "start": report.start, "end": report.end, "live": live, "outcomes": report.statuses,
        "wrong": report.wrong[:20], "broken": report.broken[:20], "broken_clients": report.broken_clients[:20],
        "left_open": report.left_open, "series": report.series,
    }


def say(document):
    print(f"soak: {document['minutes']} minutes, {document['clients']} clients, {document['cores']} cores")
    for kind, outcomes in sorted(document["outcomes"].items()):
        print(f"  {kind:16} " + ", ".join(f"{outcome} {count}" for outcome, count in sorted(outcomes.items())))
    for key in ("start", "end"):
        print(f"  at the {key}: {document[key]}")
    highest = {name: max((s[name] for s in document["series"]), default=None) for name in ("rss_mb", "descriptors", "threads")}
    print(f"  highest: {highest}; RSS slope {document['rss_slope_mb_per_minute']} MB a minute (of all: {document['rss_slope_of_all_mb_per_minute']}; of each process: {document['rss_slope_of_each_mb_per_minute']})")
    for name, live in document["live"].items():
        print(f"  /live {name}: {live}")
    for text in document["wrong"] + document["broken"] + document["broken_clients"]:
        print(f"  ! {text}")
    for check, held in document["checks"].items():
        print(f"{ {True: 'ok  ', False: 'FAIL', None: '--  '}[held]} {check}")


def main():
    options = arguments()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    report = Report()
    with tempfile.TemporaryDirectory(prefix="mixfleet-soak-") as directory:
        directory = pathlib.Path(directory)
        try:
            keys = keys_file(directory)
            server = fleet.Fleet(options.binary, directory, keys, DRAIN_S) if options.fleet else Server(options.binary, directory, keys)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            print(f"soak: {error}", file=sys.stderr)
            return 3
        end, live = multiprocessing.Event(), multiprocessing.Queue()
        watchers = [multiprocessing.Process(target=watch.live, args=(name, at, end, live)) for name, at in (("own", server.own), ("shared", server.shared))]
        try:
            for watcher in watchers:
                watcher.start()
            asyncio.run(soak(server, options, report))
        finally:
            end.set()
            measured = dict(live.get(timeout=60) for _ in watchers)
            for watcher in watchers:
                watcher.join()
            exit_code = server.end()
        report.panics = server.panics()
        if options.fleet:
            report.statuses["children that try grammars"] = {"killed": server.trials_killed}
        document = judge(report, measured, options, exit_code)
        if not document["passed"]:
            print("\n".join(server.log.read_text(errors="replace").splitlines()[-30:]), file=sys.stderr)
    if options.out:
        pathlib.Path(options.out).write_text(json.dumps(document, indent=1) + "\n")
    say(document)
    return 0 if document["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
