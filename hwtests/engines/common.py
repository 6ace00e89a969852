"""What the tests of engines share. Plain HTTP by the standard library."""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time

WAIT_S = 60


def check(holds, what):
    print(("ok      " if holds else "FAILED  ") + what, flush=True)
    if not holds:
        sys.exit(1)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def call(address, method, path, body=None, timeout=WAIT_S):
    connection = http.client.HTTPConnection(address, timeout=timeout)
    text = None if body is None else json.dumps(body)
    connection.request(method, path, text, {"content-type": "application/json"})
    response = connection.getresponse()
    return response.status, dict(response.getheaders()), response.read().decode()


class Gateway:
    """`mixfleet serve` in front of engines, each as --worker-engine has it."""

    def __init__(self, program, engines, *words):
        command = [program, "serve", "--listen", "127.0.0.1:0", *words]
        command += [f"--worker-engine={engine}" for engine in engines]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log = []
        for line in self.process.stderr:
            self.log.append(line)
            if "ready: http://" in line:
                self.address = line.split("ready: http://")[1].strip().removesuffix("/v1")
                threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()
                return
        sys.exit("mixfleet serve does not start:\n" + "".join(self.log))

    def metric(self, name):
        text = call(self.address, "GET", "/metrics")[2]
        values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name)]
        return sum(values)

    def wait_for(self, name, value):
        until = time.monotonic() + WAIT_S
        while self.metric(name) != value and time.monotonic() < until:
            time.sleep(0.1)
        return self.metric(name) == value

    def stop(self):
        self.process.kill()
        self.process.wait()


class Stream(threading.Thread):
    """A streamed chat; `started` is released with each piece of its text, and at its end."""

    def __init__(self, address, body, started):
        super().__init__(daemon=True)
        self.address, self.body, self.started = address, body, started
        self.text, self.finish, self.usage, self.done, self.ids, self.error = "", None, None, False, set(), None
        self.first_s = None
        self.start()

    def run(self):
        began = time.perf_counter()
        connection = http.client.HTTPConnection(self.address, timeout=WAIT_S)
        connection.request("POST", "/v1/chat/completions", json.dumps(self.body), {"content-type": "application/json"})
        response = connection.getresponse()
        self.id = response.headers["x-request-id"]
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                self.done = True
            elif data:
                chunk = json.loads(data)
                if "error" in chunk:
                    self.error = chunk["error"]["message"]
                    break
                self.ids.add(chunk["id"])
                self.usage = chunk.get("usage") or self.usage
                for choice in chunk["choices"]:
                    self.text += choice["delta"].get("content") or ""
                    self.finish = choice["finish_reason"] or self.finish
                if self.text:
                    self.first_s = self.first_s or time.perf_counter() - began
                    self.started.release()
        self.started.release()
