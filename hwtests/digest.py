#!/usr/bin/env python3
"""The client of digest.sh: starts servers, in turn with a kept digest and without, and times what each does first."""
import http.client, json, os, pathlib, re, shutil, statistics, subprocess, sys, threading, time

program, model, work = sys.argv[1], pathlib.Path(sys.argv[2]).resolve(), pathlib.Path(sys.argv[3])
rounds, seconds = int(sys.argv[4]), float(sys.argv[5])
cache = work / "cache"
context = json.loads((model / "config.json").read_text()).get("max_position_embeddings", 2048)


class Log(threading.Thread):
    """Reads a server's log as it comes, so that it never waits to write."""

    def __init__(self, stream):
        super().__init__(daemon=True)
        self.stream, self.lines, self.at, self.ended = stream, [], {}, False
        self.start()

    def run(self):
        for line in self.stream:
            self.lines.append(line)
            for words in ("ready: http", "computing the digest", "digest is known"):
                if words in line:
                    self.at.setdefault(words, (time.monotonic(), line))
        self.ended = True

    def wait(self, words, timeout=600.0):
        end = time.monotonic() + timeout
        while words not in self.at and not self.ended and time.monotonic() < end:
            time.sleep(0.002)
        if words not in self.at:
            sys.exit("".join(self.lines) + f"\nthe server never said '{words}'")
        return self.at[words]


def run(kept):
    """Seconds to the first token, tokens a second, and what the log says of the digest."""
    if not kept:
        for entry in (cache / "mixfleet").glob("digest-*"):
            entry.unlink()
    shutil.rmtree(work / "kv", ignore_errors=True)
    command = [program, "serve", "--listen", "127.0.0.1:0", "--model", str(model), "--kv-dram", "0.1"]
    command += ["--kv-ssd", str(work / "kv"), "--kv-ssd-gib", "1"]
    start = time.monotonic()
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "XDG_CACHE_HOME": str(cache)})
    try:
        log = Log(server.stderr)
        address = re.search(r"http://([^/\s]+)", log.wait("ready: http")[1]).group(1)
        first, tokens, began = None, 0, None
        while first is None or time.monotonic() - first < seconds:
            body = dict(model=model.name, prompt=[5 + at % 200 for at in range(16)], temperature=0, ignore_eos=True)
            body |= dict(max_tokens=min(context - 20, 4000), stream=True)
            connection = http.client.HTTPConnection(address, timeout=600)
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                sys.exit(answer.read().decode())
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                first = first or now
                if now - first > seconds:
                    break
                tokens += 1
            connection.close()
        known = log.at.get("digest is known")
        computed = float(re.search(r"seconds=([\d.e-]+)", known[1]).group(1)) if known else None
        if "computing the digest" in log.at and kept:
            sys.exit("a kept digest was computed again")
        return first - start, tokens / seconds, computed, known and known[0] - start
    finally:
        server.terminate()
        server.wait()


if not (model / "tokenizer.json").exists():
    sys.path.insert(0, str(pathlib.Path(__file__).parent / "peers"))
    from contestants import covered

    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    model = covered(model, work / model.name, vocabulary)
size = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e9
print(f"{model.name}: {size:.2f} GB; load average {os.getloadavg()[0]:.1f}", flush=True)
run(kept=False)  # calibrates, and fills the page cache
pairs = []
print("| pair | order | start to first token, s: computing / kept | tokens/s: computing / kept | digest took, s | known after, s |")
print("|---|---|---|---|---|---|")
for pair in range(rounds):
    order = (False, True) if pair % 2 == 0 else (True, False)
    if order[0]:
        run(kept=False)  # leaves the digest that the first of this pair finds
    got = {kept: run(kept) for kept in order}
    (t0, d0, took, known), (t1, d1, _, _) = got[False], got[True]
    pairs.append((t0 / t1, d0 / d1))
    spent = f"{took:.2f} | {known:.2f}" if took else "not done | "
    print(f"| {pair + 1} | {'computing' if not order[0] else 'kept'} first | {t0:.2f} / {t1:.2f} | {d0:.2f} / {d1:.2f} | {spent} |", flush=True)
first, decode = (statistics.median(column) for column in zip(*pairs))
print(f"median of pairs: start to first token x {first:.3f}, tokens/s x {decode:.3f}")
sys.exit(0 if first <= 1.05 and decode >= 0.97 else 1)
