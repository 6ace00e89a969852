"""Three hosts on one machine: network namespaces on a bridge, certificates, and the processes of a fleet in them."""

import ctypes
import json
import os
import queue
import signal
import subprocess
import threading
import time
from pathlib import Path

HOSTS = ("one", "two", "three")
ETCD_PORT, CONTROL_PORT, HTTP_PORT = 2379, 7000, 8000
API_KEY = "hosts-test"
# Which process runs on which host. etcd is on the first host too.
WORKERS = {
    "prefill-a": ("one", "prefill"),
    "prefill-b": ("two", "prefill"),
    "decode-a": ("two", "decode"),
    "decode-b": ("three", "decode"),
}
ROUTERS = {"router-a": "one", "router-b": "two"}
START_S_MAX = 60


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Network:
    """Namespaces `one`, `two`, `three`, each joined to the namespace of the bridge, where clients are."""

    def __init__(self):
        self.prefix = f"mixfleet{os.getpid()}"
        self.made = []

    def build(self):
        self._add("switch")
        switch = ("ip", "netns", "exec", self.namespace("switch"))
        run(*switch, "ip", "link", "add", "bridge", "type", "bridge")
        run(*switch, "ip", "address", "add", f"{self.address('switch')}/24", "dev", "bridge")
        run(*switch, "ip", "link", "set", "bridge", "up")
        run(*switch, "ip", "link", "set", "lo", "up")
        for host in HOSTS:
            self._add(host)
            inside = ("ip", "netns", "exec", self.namespace(host))
            run(*switch, "ip", "link", "add", host, "type", "veth", "peer", "name", "eth", "netns", self.namespace(host))
            run(*switch, "ip", "link", "set", host, "master", "bridge", "up")
            run(*inside, "ip", "address", "add", f"{self.address(host)}/24", "dev", "eth")
            run(*inside, "ip", "link", "set", "eth", "up")
            run(*inside, "ip", "link", "set", "lo", "up")

    def enter(self):
        """Puts this thread, and those that it starts later, on the bridge."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.namespace('switch')}") as namespace:
            if libc.setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), "cannot enter the bridge's namespace")

    def _add(self, name):
        run("ip", "netns", "add", self.namespace(name))
        self.made.append(name)

    def namespace(self, name):
        return f"{self.prefix}-{name}"

    def address(self, name):
        return f"10.77.0.{254 if name == 'switch' else 1 + HOSTS.index(name)}"

    def unplug(self, host):
        """The cable is pulled: the bridge's end of the link is down."""
        run("ip", "netns", "exec", self.namespace("switch"), "ip", "link", "set", host, "down")

    def swallow(self, host):
        """The link stays up but passes nothing: the bridge drops its frames."""
        run("ip", "netns", "exec", self.namespace("switch"), "ip", "link", "set", host, "nomaster")

    def mend(self, host):
        switch = ("ip", "netns", "exec", self.namespace("switch"))
        run(*switch, "ip", "link", "set", host, "master", "bridge", "up")

    def remove(self):
        for name in self.made:
            subprocess.run(("ip", "netns", "del", self.namespace(name)), capture_output=True)
        self.made = []


class Certificates:
    """An authority, one certificate that all members share, and one for etcd."""

    def __init__(self, directory, etcd_address):
        self.directory = directory
        directory.mkdir(parents=True)
        new = ("openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        run(*new, "-x509", "-days", "2", "-subj", "/CN=hosts test", "-keyout", self.path("ca.key"), "-out", self.path("ca.pem"))
        for name, alternative in (("member", "DNS:mixfleet"), ("etcd", f"IP:{etcd_address}")):
            request, extensions = self.path(f"{name}.csr"), directory / f"{name}.ext"
            run(*new, "-subj", f"/CN={name}", "-keyout", self.path(f"{name}.key"), "-out", request)
            extensions.write_text(f"subjectAltName={alternative}\nextendedKeyUsage=serverAuth,clientAuth\nbasicConstraints=CA:FALSE\n")
            run("openssl", "x509", "-req", "-days", "2", "-in", request, "-CA", self.path("ca.pem"), "-CAkey", self.path("ca.key"),
                "-CAcreateserial", "-extfile", str(extensions), "-out", self.path(f"{name}.pem"))

    def path(self, name):
        return str(self.directory / name)

    def flags(self):
        return ["--tls-ca", self.path("ca.pem"), "--tls-cert", self.path("member.pem"), "--tls-key", self.path("member.key")]


class Process:
    """A process on a host; its log is kept, and every JSON line of it with its time."""

    def __init__(self, name, command, log, env=None):
        self.name = name
        self.lines = []
        self.arrived = queue.Queue()
        # In a session of its own: the kernel lets a stopped process go on when the shell that began this run ends.
        self.child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True)
        self.reader = threading.Thread(target=self._read, args=(log,), daemon=True)
        self.reader.start()

    def _read(self, log):
        with open(log, "a") as kept:
            for line in self.child.stderr:
                kept.write(line)
                entry = {"at": time.time(), "text": line}
                try:
                    entry["fields"] = json.loads(line).get("fields", {})
                except ValueError:
                    entry["fields"] = {}
                self.lines.append(entry)
                self.arrived.put(entry)

    def says(self, text, timeout_s=START_S_MAX):
        """The next line with `text`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                entry = self.arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                tail = "".join(line["text"] for line in self.lines[-5:])
                raise RuntimeError(f"{self.name} did not say '{text}' in {timeout_s} s; its last words:\n{tail}") from None
            if text in entry["text"]:
                return entry

    def signal(self, number):
        self.child.send_signal(number)

    def kill(self):
        self.child.kill()
        self.child.wait()


class World:
    """The fleet on its hosts."""

    def __init__(self, program, model, scratch, lease_s):
        self.program, self.model, self.scratch, self.lease_s = program, model, scratch, lease_s
        self.network = Network()
        self.processes = {}
        self.retired = []
        # What a worker process was called in the registry, by our name for it.
        self.members = {}
        self.lock = threading.Lock()

    def build(self):
        self.network.build()
        self.network.enter()
        self.certificates = Certificates(self.scratch / "tls", self.network.address("one"))
        self.start_etcd()
        for name in WORKERS:
            self.start_worker(name)
        for name in WORKERS:
            self.joined(name)
        for name in ROUTERS:
            self.start_router(name)
        for name in ROUTERS:
            self.processes[name].says("ready: http://")

    def _start(self, name, host, command):
        inside = ["ip", "netns", "exec", self.network.namespace(host), *command]
        env = {**os.environ, "XDG_CACHE_HOME": str(self.scratch / "cache"), "MIXFLEET_API_KEY": API_KEY}
        process = Process(name, inside, self.scratch / f"{name}.log", env)
        with self.lock:
            if name in self.processes:
                self.retired.append(self.processes[name])
            self.processes[name] = process
        return process

    def start_etcd(self):
        client = self.etcd_url()
        peer = f"http://127.0.0.1:{ETCD_PORT + 1}"
        path = self.certificates.path
        self._start("etcd", "one", [
            "etcd", "--data-dir", str(self.scratch / "etcd"), "--unsafe-no-fsync", "--logger", "zap", "--log-level", "error",
            "--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
            "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
            "--client-cert-auth", "--trusted-ca-file", path("ca.pem"), "--cert-file", path("etcd.pem"), "--key-file", path("etcd.key")])

    def etcd_url(self):
        return f"https://{self.network.address('one')}:{ETCD_PORT}"

    def _joining(self):
        return ["--etcd", self.etcd_url(), "--lease-s", str(self.lease_s), *self.certificates.flags(), *self.model_flags(), "--json"]

    def model_flags(self):
        return ["--model", str(self.model), "--activations", "f32", "--kv-dtype", "f32", "--kv-memory", "0.1"]

    def start_worker(self, name):
        host, role = WORKERS[name]
        control = f"{self.network.address(host)}:{CONTROL_PORT + list(WORKERS).index(name)}"
        self._start(name, host, [self.program, "worker", *self._joining(), "--device", "cpu", "--role", role, "--listen-control", control])

    def joined(self, name):
        entry = self.processes[name].says('"joined"')
        self.members[name] = entry["fields"]["member"]

    def start_router(self, name):
        listen = f"{self.network.address(ROUTERS[name])}:{HTTP_PORT}"
        self._start(name, ROUTERS[name], [self.program, "router", *self._joining(), "--listen", listen])

    def routers(self):
        return [(self.network.address(host), HTTP_PORT) for host in ROUTERS.values()]

    def status(self):
        command = ["ip", "netns", "exec", self.network.namespace("one"), self.program, "fleet", "status", "--json",
                   "--etcd", self.etcd_url(), *self.certificates.flags()]
        return json.loads(run(*command))

    def words(self, name):
        """All lines of all lives of a process."""
        with self.lock:
            lives = [old for old in self.retired if old.name == name] + [self.processes[name]]
        return [line for life in lives for line in list(life.lines)]

    def end(self):
        with self.lock:
            everyone = list(self.processes.values())
        for process in everyone:
            if process.child.poll() is None:
                process.signal(signal.SIGCONT)
                process.kill()
        self.network.remove()


def alone(program, model_flags, scratch):
    """One process on this machine's own loopback, serving the same model on one device: its address and itself."""
    env = {**os.environ, "XDG_CACHE_HOME": str(Path(scratch) / "cache"), "MIXFLEET_API_KEY": API_KEY}
    command = [program, "serve", *model_flags, "--device", "cpu", "--listen", "127.0.0.1:0", "--json"]
    process = Process("alone", command, Path(scratch) / "alone.log", env)
    address = process.says("ready: http://")["text"].split("ready: http://")[1].split("/")[0]
    host, port = address.rsplit(":", 1)
    return (host, int(port)), process
