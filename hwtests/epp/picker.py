"""A picker, `mixfleet epp`, and the servers of its pool."""

import http.client
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "engines"))
from common import WAIT_S, call  # noqa: E402


class Server:
    """A model server that is none; see fake.py."""

    def __init__(self, **settings):
        self.settings = [f"{name}={value}" for name, value in settings.items()]
        self.address = "127.0.0.1:0"
        self.start()

    def start(self):
        """Starts it, again at the port that it had. Another process may have that for a moment."""
        command = [sys.executable, "-B", str(HERE / "fake.py"), self.address.split(":")[1], *self.settings]
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            if port := self.process.stdout.readline().strip():
                self.address = f"127.0.0.1:{port}"
                return
            self.kill()
            time.sleep(0.2)
        sys.exit("a server does not start")

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    stop = kill


class Picker:
    def __init__(self, program, servers, words=(), labels=None, objectives=None):
        self.file = tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False)
        self.file.close()
        self.write(servers, labels or [{} for _ in servers], objectives or {})
        self.command = [program, "epp", "--pool", self.file.name, *words]
        self.metrics = self.listen = self.health = "127.0.0.1:0"
        self.start()

    def start(self):
        """Starts it, again at the ports that it had."""
        ports = ["--listen", self.listen, "--health", self.health, "--metrics", self.metrics]
        self.process = subprocess.Popen([*self.command, *ports], stderr=subprocess.PIPE, text=True)
        self.log = []
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()
        self.metrics = self.address("answers /live", "address")
        self.listen, self.health = (self.address("picks endpoints for Envoy", field) for field in ("listen", "health"))

    def address(self, message, field):
        """The address that a line of the log tells, with the port that the system chose."""
        self.wait_for(message)
        line = next(line for line in self.log if message in line)
        return re.search(rf'\b{field}="?([0-9.:]+)', line)[1]

    def write(self, servers, labels, objectives):
        """JSON is YAML; the file is replaced as a whole, as llm-d's guide says."""
        def entry(number, server):
            host, port = server.address.rsplit(":", 1)
            return {"name": f"server-{number}", "address": host, "port": port, "labels": labels[number]}
        endpoints = [entry(number, server) for number, server in enumerate(servers)]
        whole = pathlib.Path(self.file.name + ".new")
        whole.write_text(json.dumps({"endpoints": endpoints, "objectives": objectives}))
        whole.replace(self.file.name)

    def wait_for(self, text, many=1):
        until = time.monotonic() + WAIT_S
        while sum(text in line for line in self.log) < many:
            if time.monotonic() > until or self.process.poll() is not None:
                self.stop()
                sys.exit(f"the picker does not say {text!r}:\n" + "".join(self.log[-40:]))
            time.sleep(0.02)

    def metric(self, name):
        text = call(self.metrics, "GET", "/metrics")[2]
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    def placement(self, request):
        """Where a request was placed, by the explanation, and the explanation."""
        status, _, text = call(self.metrics, "GET", f"/debug/placement/{request}")
        explanation = json.loads(text)
        if status != 200:
            return None, explanation
        chosen = next(one for one in explanation["candidates"] if one["outcome"]["outcome"] == "chosen")
        return chosen["decode_device"].removeprefix("vllm:").removeprefix("llamacpp:"), explanation

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.kill()
        pathlib.Path(self.file.name).unlink(missing_ok=True)


class Setup:
    """Things that are stopped in reverse order, also where the start of one fails."""

    def __init__(self):
        self.stops = []

    def add(self, thing):
        self.stops.append(thing.stop)
        return thing

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for stop in reversed(self.stops):
            stop()


class Answered:
    """An answer, with when its first byte came and the pieces in which it did."""

    def __init__(self, address, path, body, headers=None):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        began = time.perf_counter()
        connection = http.client.HTTPConnection(address, timeout=WAIT_S)
        method = "POST" if raw else "GET"
        connection.request(method, path, raw or None, {"content-type": "application/json", **(headers or {})})
        response = connection.getresponse()
        self.status, self.headers = response.status, {name.lower(): value for name, value in response.getheaders()}
        first = response.read1(1)
        self.first_s = time.perf_counter() - began
        self.body = first + response.read()
        self.whole_s = time.perf_counter() - began
        connection.close()


__all__ = ["WAIT_S", "Answered", "Picker", "Server", "Setup", "call"]
