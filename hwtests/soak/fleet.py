"""A fleet to soak: etcd, a worker that prefills and one that decodes with tiers on disk, a router and a gateway
before it. Members speak mutual TLS, with certificates that openssl makes for this run. Children that try grammars are
killed now and then, and after a while no process reads the logs of the router and of a worker, whose pipes are closed later."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import threading
import time

START_S_MAX = 120
# A child that compiles a grammar lives for some 10 ms: this many are looked for, and one in this many is
# killed.
LOOK_EVERY_S = 0.02
KILL_ONE_IN = 4
# Seconds until the logs are no longer read, and until their pipes are closed.
UNREAD_AFTER_S, CLOSED_AFTER_S = 20, 40


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(directory):
    """The environment of all processes. Tiles (AMX) sum in another order with more rows, so that answers with near
    ties depend on the batch; the level below does not, and answers are compared."""
    own = {"XDG_CACHE_HOME": str(directory), "XDG_DATA_HOME": str(directory)}
    has_tiles = "amx_bf16" in pathlib.Path("/proc/cpuinfo").read_text()
    return {**os.environ, **({"MIXFLEET_CPU_ISA": "avx512bf16"} if has_tiles else {}), **own}


def certificates(directory):
    """Flags that name a member's certificate of a new authority."""
    run = lambda *words: subprocess.run(("openssl", *words), cwd=directory, check=True, capture_output=True)
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    run("req", "-x509", *new, "-days", "1", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    run("req", *new, "-subj", "/CN=mixfleet", "-keyout", "member.key", "-out", "member.csr")
    (directory / "names").write_text("subjectAltName=DNS:mixfleet\nextendedKeyUsage=clientAuth,serverAuth\n")
    run("x509", "-req", "-in", "member.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1", "-extfile", "names", "-out", "member.pem")
    (directory / "member.key").chmod(0o600)
    return ["--tls-ca", directory / "ca.pem", "--tls-cert", directory / "member.pem", "--tls-key", directory / "member.key"]


class Member:
    """A process of the fleet, with its log in a file, to which a pipe leads if it is lost later."""

    def __init__(self, name, words, directory, is_lost=False):
        self.name, self.log = name, directory / f"{name}.log"
        with open(self.log, "wb") as log:
            to = subprocess.PIPE if is_lost else log
            self.process = subprocess.Popen([str(word) for word in words], stdout=to, stderr=subprocess.STDOUT, env=environment(directory))
        if is_lost:
            threading.Thread(target=self.read_and_lose, daemon=True).start()

    def read_and_lose(self):
        """Copies the pipe into the file, then leaves it full, then closes it."""
        began = time.monotonic()
        pipe = self.process.stdout
        os.set_blocking(pipe.fileno(), False)
        with open(self.log, "ab", buffering=0) as log:
            while time.monotonic() - began < UNREAD_AFTER_S:
                log.write(pipe.read() or b"")
                time.sleep(0.05)
        time.sleep(max(0, began + CLOSED_AFTER_S - time.monotonic()))
        pipe.close()

    def says(self, pattern):
        """The match of a pattern in the log, once it is there."""
        deadline = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline and self.process.poll() is None:
            if match := re.search(pattern, self.log.read_text(errors="replace")):
                return match
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} did not start:\n{self.log.read_text(errors='replace')[-4000:]}")


class Fleet:
    """Where the gateway answers, and the processes that are watched. It has the interface of `run.Server`."""

    def __init__(self, binary, directory, keys, drain_s):
        self.drain_s, self.ended, self.trials_killed = drain_s, threading.Event(), 0
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        etcd = ["etcd", "--data-dir", directory / "etcd", "--log-level", "error", "--listen-client-urls", client]
        etcd += ["--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        self.etcd = Member("etcd", [*etcd, "--initial-cluster", f"default={peer}"], directory)
        member = ["--etcd", client, *certificates(directory)]
        self.members = []
        try:
            for role, device in (("prefill", "cpu@0"), ("decode", "cpu@1")):
                disk = directory / f"ssd-{role}"
                words = [binary, "worker", *member, "--device", device, "--role", role, "--kv-memory", "0.05"]
                words += ["--kv-dram", "0.05", "--kv-ssd", disk, "--kv-ssd-gib", "0.2"]
                self.members.append(Member(f"worker-{role}", words, directory, is_lost=role == "decode"))
            [worker.says("joined") for worker in self.members]
            router = [binary, "router", *member, "--listen", "127.0.0.1:0", "--drain-s", drain_s]
            self.members.append(Member("router", router, directory, is_lost=True))
            behind = self.members[-1].says(r"ready: (http://[^/]+)/v1")[1]
            gateway = [binary, "serve", "--worker-engine", f"mixfleet:{behind}", "--listen", "127.0.0.1:0"]
            gateway += ["--health-listen", "127.0.0.1:0", "--api-keys", keys, "--drain-s", drain_s, "--json"]
            front = Member("gateway", gateway, directory)
            self.members.append(front)
            self.process, self.log = front.process, front.log
            self.own = address(front.says(r'answers /live[^\n]*?"address":"([^"]+)"|"address":"([^"]+)"[^\n]*answers /live'))
            self.shared = address(front.says(r"ready: http://([^/]+)/v1"))
            threading.Thread(target=self.kill_trials, daemon=True).start()
        except RuntimeError:
            self.end()
            raise

    def kill_trials(self):
        """Kills one in some of the children that try grammars."""
        seen = set()
        while not self.ended.wait(LOOK_EVERY_S):
            for pid in self.pids():
                try:
                    tasks = [path.read_text().split() for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children")]
                except OSError:
                    continue
                for child in {int(child) for children in tasks for child in children} - seen:
                    seen.add(child)
                    if len(seen) % KILL_ONE_IN == 0:
                        try:
                            os.kill(child, signal.SIGKILL)
                            self.trials_killed += 1
                        except OSError:
                            pass

    def pids(self):
        """The processes that must not grow; etcd is not ours."""
        return [member.process.pid for member in self.members]

    def panics(self):
        return sum(member.log.read_text(errors="replace").count("panicked at") for member in self.members)

    def end(self):
        """Tells all to end, the gateway first; the first exit code that is not 0, or None if one had to be killed."""
        codes = []
        self.ended.set()
        for member in reversed(self.members):
            member.process.send_signal(signal.SIGTERM)
            try:
                codes.append(member.process.wait(timeout=self.drain_s + 30))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
                codes.append(None)
        self.etcd.process.kill()
        self.etcd.process.wait()
        return next((code for code in codes if code != 0), 0)


def address(match):
    host, _, port = next(group for group in match.groups() if group).rpartition(":")
    return host, int(port)
