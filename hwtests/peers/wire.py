#!/usr/bin/env python3
"""mixfleet's transports beside iperf3, memcpy, Mooncake's transfer engine and NIXL, over loopback and a 1 Gbit/s veth pair.

    cargo build --release -p mixfleet-wire --features tls --example wire_bench
    python3 -m venv target/peers/wire && target/peers/wire/bin/pip install mooncake-transfer-engine-non-cuda==0.3.13.post1 nixl==1.5.1 torch==2.15.0
    hwtests/peers/wire.py                      # 6 minutes; as root for the veth pair

All contestants take turns within a round; the table has medians over the rounds, and every sample is in
target/peers/results/wire.json. A contestant that is not installed is reported as SKIPPED. iperf3 sends and receives one buffer over and
over, which stays in the cache, as do the 4 MiB of `tcp, warm`; `tcp` goes through 256 MiB at each end, and so do the bare
sockets of wire_sockets.py. `tcp` chooses the congestion control reno between processes of one host, whose own may pace;
`iperf3` has the host's own, `iperf3, reno` that one. GB/CPU s is what was moved for each second of processor time of the busier
process: it says the same on a machine that others use too. `tcp, verified` is how instances move KV (into a staging slot, hashed, out
of the other end's slot, compared), `tcp, copied` the same without hashes.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# (name, bytes of a piece, pieces of a batch, batches in flight)
SHAPES = [
    ("8 B", 8, 1, 1),
    ("64 KiB", 64 << 10, 1, 1),
    ("1 MiB", 1 << 20, 1, 1),
    ("16 MiB", 16 << 20, 1, 1),
    ("128 x 64 KiB", 64 << 10, 128, 1),
    ("1 MiB, 16 in flight", 1 << 20, 1, 16),
    ("16 MiB, 4 in flight", 16 << 20, 1, 4),
]


def last_json(command, env=None, timeout=60):
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **(env or {})})
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{command[0]} failed ({done.returncode}): {(done.stderr or done.stdout)[-300:]}")
    return json.loads(lines[-1])


def with_cpu(sample):
    busier = max(sample.get("initiator_cpu_s", 0), sample.get("target_cpu_s", 0))
    if busier > 0.05:
        sample["gb_per_cpu_s"] = sample["gb_per_s"] * sample["seconds"] / busier
    return sample


class Contest:
    def __init__(self, options):
        self.options = options
        self.samples = {}

    def ours(self, transport, shape, *more):
        _, size, batch, depth = shape
        words = ["--transport", transport, "--bytes", size, "--batch", batch, "--depth", depth]
        words += ["--seconds", self.options.seconds, *more]
        return with_cpu(last_json([self.options.bench, "run", *map(str, words)]))

    def memcpy(self, shape, *more):
        words = ["--bytes", shape[1], "--seconds", self.options.seconds, *more]
        return with_cpu(last_json([self.options.bench, "memcpy", *map(str, words)]))

    def nixl(self, shape, env):
        _, size, batch, depth = shape
        words = ["--bytes", size, "--batch", batch, "--depth", depth, "--seconds", self.options.seconds]
        command = [str(self.options.venv / "bin/python"), str(HERE / "nixl_transfer.py"), *map(str, words)]
        return with_cpu(last_json(command, env))

    def sockets(self, streams, size):
        command = [sys.executable, HERE / "wire_sockets.py", "--bytes", size, "--streams", streams, "--seconds", self.options.seconds]
        return with_cpu(last_json([str(word) for word in command]))

    def iperf3(self, streams, size, prefix=((), ()), address="127.0.0.1", more=()):
        server = subprocess.Popen([*prefix[0], "iperf3", "-s", "-1", "-p", "5299"], stdout=subprocess.DEVNULL)
        try:
            time.sleep(0.3)
            command = [*prefix[1], "iperf3", "-c", address, "-p", "5299", "-J", "-P", streams, "-l", min(size, 1 << 20), *more]
            done = subprocess.run([*map(str, command), "-t", str(max(1, round(self.options.seconds)))], capture_output=True, text=True, timeout=60)
            end = json.loads(done.stdout)["end"]
        finally:
            server.kill()
            server.wait()
        got, cpu = end["sum_received"], end["cpu_utilization_percent"]
        seconds = got["seconds"]
        return with_cpu({
            "gb_per_s": got["bits_per_second"] / 8e9, "seconds": seconds,
            "initiator_cpu_s": cpu["host_total"] / 100 * seconds, "target_cpu_s": cpu["remote_total"] / 100 * seconds,
        })

    def mooncake(self, shape):
        _, size, batch, depth = shape
        program = self.options.venv / "bin/transfer_engine_bench"
        env = {**os.environ, "MC_TCP_BIND_ADDRESS": "127.0.0.1"}
        common = ["-protocol=tcp", "-metadata_server=P2PHANDSHAKE", "-buffer_size=268435456"]
        with tempfile.TemporaryFile("w+") as log:
            target = subprocess.Popen([program, "-mode=target", "-local_server_name=127.0.0.1:13001", *common], stdout=log, stderr=log, env=env, start_new_session=True)
            try:
                segment = None
                for _ in range(100):
                    time.sleep(0.1)
                    log.seek(0)
                    found = re.search(r"listening on (\S+:\d+)", log.read())
                    if found:
                        segment = found[1]
                        break
                if not segment:
                    raise RuntimeError("Mooncake's target did not come up")
                time.sleep(0.5)
                words = [f"-segment_id={segment}", "-local_server_name=127.0.0.1:13002", "-operation=write", f"-block_size={size}"]
                words += [f"-batch_size={batch * depth}", "-threads=1", f"-duration={max(1, round(self.options.seconds))}", "-report_unit=GB"]
                done = subprocess.run([program, "-mode=initiator", *words, *common], capture_output=True, text=True, timeout=60, env=env)
            finally:
                # the program that pip installs starts another one
                os.killpg(target.pid, signal.SIGKILL)
                target.wait()
        found = re.search(r"throughput ([\d.]+) GB", done.stdout + done.stderr)
        if not found:
            raise RuntimeError(f"Mooncake: {(done.stdout + done.stderr)[-300:]}")
        return {"gb_per_s": float(found[1])}

    def take(self, row, column, measure):
        if (row, column) in self.samples and isinstance(self.samples[row, column], str):
            return
        try:
            sample = measure()
        except (RuntimeError, OSError, subprocess.TimeoutExpired, json.JSONDecodeError, KeyError) as error:
            self.samples.setdefault((row, column), f"SKIPPED: {error}")
            print(f"SKIPPED: {column}, {row}: {error}", file=sys.stderr)
            return
        if not isinstance(self.samples.setdefault((row, column), []), str):
            self.samples[row, column].append(sample)
        print(f"{column}, {row}: {sample['gb_per_s']:.3f} GB/s", file=sys.stderr)

    def round(self):
        streams = self.options.streams
        for shape in SHAPES:
            row = shape[0]
            self.take(row, "tcp", lambda: self.ours("tcp", shape, "--streams", streams))
            self.take(row, "Mooncake tcp", lambda: self.mooncake(shape))
            self.take(row, "NIXL tcp", lambda: self.nixl(shape, {"UCX_TLS": "tcp"}))
            if shape[1] >= 1 << 20 and shape[3] > 1:
                self.take(row, "bare sockets", lambda: self.sockets(streams, shape[1]))
                warm = (row, 1 << 20, shape[1] * shape[2] >> 20, shape[3])
                self.take(row, "tcp, warm", lambda: self.ours("tcp", warm, "--streams", streams, "--memory", 4 << 20))
                self.take(row, "iperf3, reno", lambda: self.iperf3(streams, shape[1], more=("-C", "reno")))
                self.take(row, "iperf3", lambda: self.iperf3(streams, shape[1]))
                self.take(row, "tcp, copied", lambda: self.ours("tcp", shape, "--streams", streams, "--copy"))
                self.take(row, "tcp, verified", lambda: self.ours("tcp", shape, "--streams", streams, "--verify"))
                self.take(row, "tcp under TLS", lambda: self.ours("tcp", shape, "--streams", 2, "--tls"))
            self.take(row, "shm", lambda: self.ours("shm", shape))
            self.take(row, "NIXL shm", lambda: self.nixl(shape, {}))
            if shape[2] == shape[3] == 1 and shape[1] > 8:
                self.take(row, "memcpy", lambda: self.memcpy(shape))
                self.take(row, "memcpy, shared pages", lambda: self.memcpy(shape, "--regions"))
        if self.options.veth:
            self.veth()

    def veth(self):
        """Both ends in namespaces of their own, joined at 1 Gbit/s."""
        names = [f"mixfleet-wire-{end}-{os.getpid()}" for end in "ab"]
        sh = lambda line: subprocess.run(line.split(), check=True, capture_output=True)
        inside = lambda end: ["ip", "netns", "exec", names[end]]
        row, streams = "1 MiB, 16 in flight, 1 Gbit/s veth", 2
        try:
            for name in names:
                sh(f"ip netns add {name}")
            sh(f"ip link add va netns {names[0]} type veth peer name vb netns {names[1]}")
            for end, name in enumerate(names):
                device = "v" + "ab"[end]
                sh(f"ip -n {name} addr add 10.99.0.{end + 1}/24 dev {device}")
                sh(f"ip -n {name} link set {device} up")
                sh(f"ip -n {name} link set lo up")
                sh(f"tc -n {name} qdisc add dev {device} root tbf rate 1gbit burst 1mb latency 10ms")
            self.take(row, "iperf3", lambda: self.iperf3(streams, 1 << 20, (inside(0), inside(1)), "10.99.0.1"))
            self.take(row, "tcp", lambda: self.over_veth(inside, streams))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"SKIPPED: veth: {error}", file=sys.stderr)
        finally:
            for name in names:
                subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def over_veth(self, inside, streams):
        bench = self.options.bench
        target = subprocess.Popen(
            [*inside(0), bench, "target", "--insecure", "--listen", "10.99.0.1:0"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        try:
            with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                file.write(target.stdout.readline())
                file.flush()
                command = [*inside(1), bench, "run", "--insecure", "--listen", "10.99.0.2:0", "--descriptor", file.name]
                command += ["--depth", "16", "--streams", str(streams), "--warm", "16777216", "--seconds", str(max(2, self.options.seconds))]
                return with_cpu(last_json(command))
        finally:
            target.kill()
            target.wait()

    def report(self):
        columns = list(dict.fromkeys(column for _, column in self.samples))
        rows = list(dict.fromkeys(row for row, _ in self.samples))
        for title, key, digits in [
            ("GB/s", "gb_per_s", 2), ("GB/CPU s", "gb_per_cpu_s", 2), ("p50, us", "latency_us_p50", 0), ("p99, us", "latency_us_p99", 0),
        ]:
            print(f"\n| {title} | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
            for row in rows:
                cells = []
                for column in columns:
                    samples = self.samples.get((row, column), [])
                    values = [s[key] for s in samples if key in s] if isinstance(samples, list) else []
                    cells.append(f"{statistics.median(values):.{digits if title != 'GB/s' or row != '8 B' else 4}f}" if values else "")
                print(f"| {row} | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", default=str(ROOT / "target/release/examples/wire_bench"))
    parser.add_argument("--venv", type=Path, default=ROOT / "target/peers/wire")
    parser.add_argument("--out", type=Path, default=ROOT / "target/peers/results/wire.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1)
    parser.add_argument("--streams", type=int, default=1, help="of tcp and iperf3 over loopback; two under TLS and over the veth pair")
    parser.add_argument("--no-veth", dest="veth", action="store_false")
    options = parser.parse_args()
    if not shutil.which(options.bench):
        raise SystemExit(f"{options.bench} is not there: the first line of --help builds it")
    contest = Contest(options)
    loads = []
    for _ in range(options.rounds):
        loads.append(os.getloadavg()[0])
        contest.round()
    loads.append(os.getloadavg()[0])
    contest.report()
    print(f"\nLoad average before each round and at the end: {', '.join(f'{load:.1f}' for load in loads)} on {os.cpu_count()} cores.")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    samples = [{"row": row, "column": column, "samples": samples} for (row, column), samples in contest.samples.items()]
    options.out.write_text(json.dumps({"schema": "mixfleet.peers_wire.v1", "loads": loads, "samples": samples}, indent=1))


main()
