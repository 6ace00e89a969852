"""Shared code of the attacks: a server, requests, memory and pauses. Plain Python, no packages."""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time

WAIT_S = 120


def program_and_full():
    """The binary under attack, and whether the long form was requested."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--full"]
    if len(arguments) != 1:
        sys.exit("usage: ATTACK.py MIXFLEET [--full]")
    return os.path.abspath(arguments[0]), "--full" in sys.argv


def skip(reason):
    print(f"SKIPPED: attack: {reason}", flush=True)
    sys.exit(3)


class Checks:
    """Collects what held and what did not; `end` exits with the result."""

    def __init__(self):
        self.failed = []

    def check(self, holds, what):
        print(("ok      " if holds else "FAILED  ") + what, flush=True)
        if not holds:
            self.failed.append(what)
        return holds

    def end(self):
        sys.exit(1 if self.failed else 0)


class Server:
    """A `mixfleet` process that serves HTTP, from its start until `stop`."""

    def __init__(self, program, *words, command="serve", environment=None):
        words = [program, command, "--listen", "127.0.0.1:0", *words]
        self.directory = tempfile.TemporaryDirectory(prefix="mixfleet-attack-")
        environment = {"XDG_CACHE_HOME": self.directory.name, **os.environ, **(environment or {})}
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
        self.log = []
        for line in self.process.stderr:
            self.log.append(line)
            if "ready: http://" in line:
                self.address = line.split("ready: http://")[1].strip().removesuffix("/v1")
                threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()
                return
        sys.exit(f"{' '.join(words)} does not start:\n" + "".join(self.log))

    def ask(self, method, path, body=None, headers=None, timeout=WAIT_S):
        """Returns (status, text); a connection that breaks is status 0 with the reason."""
        connection = http.client.HTTPConnection(self.address, timeout=timeout)
        text = body if body is None or isinstance(body, (str, bytes)) else json.dumps(body)
        try:
            connection.request(method, path, text, {"content-type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return 0, f"{type(error).__name__}: {error}"
        finally:
            connection.close()

    def metric(self, name):
        """Sum of a metric's samples, over all labels."""
        lines = self.ask("GET", "/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def alive(self):
        return self.process.poll() is None

    def rss_mb(self):
        """Resident memory of the process and its children, in MB (1e6 bytes)."""
        pids = [self.process.pid] + children(self.process.pid)
        return sum(rss_kib(pid) for pid in pids) * 1024 / 1e6

    def stop(self):
        self.process.kill()
        self.process.wait()


def children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            found = [int(child) for child in file.read().split()]
    except OSError:
        return []
    return found + [below for child in found for below in children(child)]


def rss_kib(pid):
    try:
        with open(f"/proc/{pid}/status") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("VmRSS:")), 0)
    except OSError:
        return 0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Fleet:
    """etcd, workers and a router on loopback; `router` takes requests like a server. None without etcd."""

    def __init__(self, program, *devices):
        self.directory = tempfile.TemporaryDirectory(prefix="mixfleet-attack-")
        client, peer = free_port(), free_port()
        url = f"http://127.0.0.1:{client}"
        words = ["etcd", "--data-dir", self.directory.name, "--listen-client-urls", url, "--advertise-client-urls", url]
        words += ["--listen-peer-urls", f"http://127.0.0.1:{peer}", "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"]
        words += ["--initial-cluster", f"default=http://127.0.0.1:{peer}", "--log-level", "error"]
        self.processes = [subprocess.Popen(words, stderr=subprocess.DEVNULL)]
        # the token by which processes of a user know each other is there
        cache = {"XDG_CACHE_HOME": self.directory.name}
        environment = {**os.environ, **cache}
        for device in devices:
            worker = [program, "worker", "--etcd", url, "--device", device, "--role", "auto", "--kv-memory", "0.05"]
            self.processes.append(subprocess.Popen(worker, stderr=subprocess.DEVNULL, env=environment))
        self.router = Server(program, "--etcd", url, command="router", environment=cache)
        until = time.monotonic() + WAIT_S
        while self.router.ask("GET", "/health")[0] != 200 and time.monotonic() < until:
            time.sleep(0.1)

    @staticmethod
    def is_possible(program):
        has_router = subprocess.run([program, "router", "--help"], capture_output=True, check=False).returncode == 0
        return has_router and shutil.which("etcd") is not None

    def alive(self):
        return self.router.alive() and all(process.poll() is None for process in self.processes)

    def stop(self):
        self.router.stop()
        for process in self.processes:
            process.kill()
            process.wait()


class Pauses(threading.Thread):
    """Streams a long answer, and keeps the longest time between two of its tokens."""

    def __init__(self, server, max_tokens=2000, headers=None):
        super().__init__(daemon=True)
        self.server, self.headers = server, headers or {}
        self.body = {"model": "m", "prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self.pause_s_max, self.tokens, self.error, self.stopping = 0.0, 0, None, False
        self.first = threading.Event()
        model = json.loads(server.ask("GET", "/v1/models", headers=self.headers)[1])["data"][0]["id"]
        self.body["model"] = model
        self.start()

    def run(self):
        while not self.stopping:
            connection = http.client.HTTPConnection(self.server.address, timeout=WAIT_S)
            try:
                connection.request("POST", "/v1/completions", json.dumps(self.body), {"content-type": "application/json", **self.headers})
                response = connection.getresponse()
                if response.status != 200:
                    self.error = response.read().decode(errors="replace")
                    return
                last = None
                for line in response:
                    if self.stopping:
                        return
                    if not line.startswith(b"data: {"):
                        continue
                    now = time.perf_counter()
                    if last is not None:
                        self.pause_s_max = max(self.pause_s_max, now - last)
                    last = now
                    self.tokens += 1
                    self.first.set()
            except (OSError, http.client.HTTPException) as error:
                self.error = f"{type(error).__name__}: {error}"
                return
            finally:
                connection.close()
                self.first.set()

    def end(self):
        self.stopping = True
        return self.pause_s_max
