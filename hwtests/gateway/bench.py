"""Measures gateways between the load and the fake engines of `gateway_load`; see hwtests/gateway.sh."""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ENGINES = 4
# what a request is: bytes of its body, tokens of its answer, ms between them
LONG, STREAM = ("220000", "16", "5"), ("2000", "250", "20")


def free_ports(count):
    """Free ports of 127.0.0.1."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def cpu_s(pid):
    """CPU time of a process and its children, in seconds."""
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(") ", 1)[1].split()
            parent, session = int(fields[1]), int(fields[3])
        except (OSError, IndexError):
            continue
        if int(stat.parent.name) == pid or parent == pid or session == pid:
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def resident_mib(pid):
    """Largest resident memory of a process so far, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return float("nan")


def log_of(name):
    return Path(tempfile.gettempdir()) / f"gateway-bench-{name}.log"


class Contestant:
    """A server between clients and engines, or none."""

    def __init__(self, name, command, urls, environment=None):
        self.name, self.urls, self.process = name, urls, None
        if command:
            log = open(log_of(name), "w")  # noqa: SIM115
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True,
                                            env={**os.environ, **(environment or {})})

    def serves(self):
        """Whether a chat is answered within a minute."""
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1,
                "stream": True}
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                request = urllib.request.Request(f"{self.urls[0]}/v1/chat/completions", json.dumps(body).encode(),
                                                 {"content-type": "application/json"})
                with urllib.request.urlopen(request, timeout=5) as answer:
                    if b"[DONE]" in answer.read():
                        return True
            except OSError:
                pass
            if self.process and self.process.poll() is not None:
                return False
            time.sleep(0.2)
        return False

    def stop(self):
        """Ends it."""
        if self.process:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()


def contestants(program, packages, ports):
    """Names and makers of all that can be measured here."""
    engines = [f"http://127.0.0.1:{port}" for port in ports]
    yield "direct", lambda: Contestant("direct", None, engines)

    def own():
        port = free_ports(1)[0]
        words = [f"--worker-engine=vllm:{engine},part=L4,shape=llama-3.1-8b,usd=0.7" for engine in engines]
        command = [program, "serve", "--name", "m", "--listen", f"127.0.0.1:{port}", "--requests", "2000", *words]
        return Contestant("mixfleet", command, [f"http://127.0.0.1:{port}"])

    yield "mixfleet", own
    for name in ["vllm-router", "smg", "sglang-router"]:
        if not (packages / name / "complete").exists():
            continue

        def peer(name=name):
            port, metrics = free_ports(2)
            module = f"{name.replace('-', '_')}.launch_router"
            command = [sys.executable, "-B", "-m", module, "--host", "127.0.0.1", "--port", str(port),
                       "--prometheus-port", str(metrics), "--policy", "power_of_two", "--worker-urls", *engines]
            return Contestant(name, command, [f"http://127.0.0.1:{port}"], {"PYTHONPATH": str(packages / name)})

        yield name, peer


def measure(load, contestant, kind, many, seconds, shape):
    """One load on one contestant."""
    pid = contestant.process.pid if contestant.process else None
    before = cpu_s(pid) if pid else 0.0
    command = [load, kind, ",".join(contestant.urls), str(many), str(seconds), *shape]
    seen = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if pid:
        seen["cpu_s"] = cpu_s(pid) - before
        seen["resident_mib"] = resident_mib(pid)
    return {"contestant": contestant.name, "load": kind, "many": many, **seen}


def row(seen, direct):
    """A line of the table."""
    def ms(of, quantile):
        value = seen[of][quantile]
        return "-" if value is None else f"{value:.2f}"

    added = "-"
    if direct and seen["token_way_ms"]["p99"] is not None and direct["token_way_ms"]["p99"] is not None:
        added = f"{seen['token_way_ms']['p99'] - direct['token_way_ms']['p99']:+.2f}"
    cpu = f"{seen['cpu_s'] / max(seen['whole'], 1) * 1e3:.2f}" if "cpu_s" in seen else "-"
    cells = [seen["contestant"], f"{seen['load']} {seen['many']}", f"{seen['whole']}/{seen['asked']}",
             f"{seen['whole_per_s']:.0f}", ms("ttft_ms", "p50"), ms("ttft_ms", "p99"), ms("token_way_ms", "p50"),
             ms("token_way_ms", "p99"), added, cpu, f"{seen.get('resident_mib', 0):.0f}"]
    return "| " + " | ".join(cells) + " |"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("load")
    parser.add_argument("packages", type=Path)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    ports = free_ports(ENGINES)
    engines = subprocess.Popen([given.load, "workers", *map(str, ports)])
    loads = [("streams", 100, STREAM), ("rate", 100, LONG), ("rate", 200, LONG), ("rate", 400, LONG)]
    print(f"load of the machine before: {os.getloadavg()[0]:.2f}, cores: {os.cpu_count()}")
    print("| | load | whole/asked | whole/s | TTFT p50, ms | p99 | token's way p50, ms | p99 | p99 added | CPU ms/request | MiB |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    failed = False
    try:
        for _ in range(given.rounds):
            direct = {}
            for name, make in contestants(given.program, given.packages.resolve(), ports):
                contestant = make()
                try:
                    if not contestant.serves():
                        print(f"{name} does not serve; see {log_of(name)}", file=sys.stderr)
                        failed |= name == "mixfleet"
                        continue
                    for kind, many, shape in loads:
                        seen = measure(given.load, contestant, kind, many, given.seconds, shape)
                        if name == "direct":
                            direct[kind, many] = seen
                        print(row(seen, direct.get((kind, many)) if name != "direct" else None), flush=True)
                        print(json.dumps(seen), file=sys.stderr, flush=True)
                finally:
                    contestant.stop()
    finally:
        engines.kill()
    print(f"load of the machine after: {os.getloadavg()[0]:.2f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
