"""Two vLLM servers behind `mixfleet serve`; see ../engines.sh. It runs in vLLM's own environment.

What is known of the engines' caches comes to mixfleet through a relay, which can be cut, and is compared with a replay
of all events from the engine itself. `record` in place of the program writes the test data of runtime/engines/tests.
"""

import json
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import zmq

from common import Gateway, Stream, call, check, free_port

START_S = 420
BLOCK = 32
REQUESTS = int(os.environ.get("REQUESTS", "300"))
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONHASHSEED": "0", "VLLM_SERVER_DEV_MODE": "1",
}


class Engine:
    def __init__(self, model, log, events=None, blocks=512, context=4096, hands_off=False, connector=None,
                 dtype="float32", environment=None):
        self.address = f"127.0.0.1:{free_port()}"
        self.events, self.replay = events or f"tcp://*:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
        publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.events,
                   "replay_endpoint": self.replay, "topic": "kv-events"}
        host, port = self.address.split(":")
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--host", host, "--port", port]
        command += ["--served-model-name", "m", "--enforce-eager", "--dtype", dtype, "--max-model-len", str(context)]
        command += ["--max-num-seqs", "8", "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(blocks)]
        command += ["--enable-prompt-tokens-details", "--kv-events-config", json.dumps(publish)]
        self.command, self.log, self.environment = command, log, os.environ | ENVIRONMENT
        if hands_off:
            connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
            command += ["--kv-transfer-config", json.dumps(connector)]
            self.environment |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "UCX_TLS": "tcp,shm,self",
                                 "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        if connector:
            command += ["--kv-transfer-config", json.dumps(connector)]
            self.environment["PYTHONPATH"] = str(pathlib.Path(__file__).parents[2] / "runtime/engines/vllm")
        self.environment |= environment or {}
        self.start()

    def start(self):
        with open(self.log, "w") as file:
            self.process = subprocess.Popen(
                self.command, stdout=file, stderr=file, env=self.environment, start_new_session=True)

    def wait(self):
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            try:
                if call(self.address, "GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.5)
        sys.exit(f"a vLLM server does not start:\n{pathlib.Path(self.log).read_text()[-3000:]}")

    def metric(self, name):
        lines = call(self.address, "GET", "/metrics")[2].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + " ", name + "{")))

    def signal(self, number):
        os.killpg(self.process.pid, number)

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def held(self):
        """Its cache as all its events tell it: blocks of tokens alone, each as often as it was stored."""
        held = {}
        for payload in self.replayed():
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "AllBlocksCleared":
                    held = {}
                elif event["type"] == "BlockRemoved":
                    for block in event["block_hashes"]:
                        if held.get(block):
                            held[block] -= 1
                elif event["parent_block_hash"] is None or held.get(event["parent_block_hash"]):
                    keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
                    for block, key in zip(event["block_hashes"], keys):
                        if key is not None:
                            break
                        held[block] = held.get(block, 0) + 1
        return {block for block, times in held.items() if times}

    def replayed(self):
        """The payloads of all events. The engine's queue holds a thousand, so that it is asked until all have come."""
        payloads = []
        while True:
            asked = zmq.Context.instance().socket(zmq.DEALER)
            asked.setsockopt(zmq.LINGER, 0)
            asked.set_hwm(0)
            asked.connect(self.replay)
            asked.send_multipart([b"", len(payloads).to_bytes(8, "big")])
            is_whole = True
            while True:
                if not asked.poll(10_000):
                    is_whole = False
                    break
                _, _, number, payload = asked.recv_multipart()
                if number == b"\xff" * 8:
                    break
                number = int.from_bytes(number, "big")
                is_whole &= number <= len(payloads)
                if number == len(payloads):
                    payloads.append(payload)
            asked.close()
            if is_whole:
                return payloads


class Relay:
    """Relays bytes between a client and a port, until it is cut."""

    def __init__(self, port, record=None, before=lambda data: None):
        self.port, self.record, self.is_cut, self.open, self.refused = port, record, False, [], 0
        # called with what is sent to the port, before it is sent on
        self.before = before
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.own_port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            near, _ = self.listener.accept()
            if self.is_cut:
                near.close()
                self.refused += 1
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.port))
            except OSError:
                near.close()
                continue
            self.open += [near, far]
            threading.Thread(target=self.carry, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self.carry, args=(far, near, self.record or False), daemon=True).start()
            self.record = None

    def carry(self, source, sink, record):
        try:
            while data := source.recv(65536):
                if record is None:
                    self.before(data)
                if record:
                    with open(record, "ab") as file:
                        file.write(data)
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def cut(self):
        self.is_cut = True
        for end in self.open:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.open = []

    def heal(self):
        self.is_cut = False


def words(source, count):
    return " ".join("".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(count))


def chat(text, tokens, **more):
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    return {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def known(gateway):
    """Of each engine the blocks that mixfleet knows of, and how many keys its machine has of them."""
    data = json.loads(call(gateway.address, "GET", "/debug/kv")[2])["data"]
    return [({block for _, block in one["blocks"]}, one["keys"]) for one in data]


def same(gateway, engines):
    """Waits until nothing comes any more, and compares what is known with what the engines have."""
    until = time.monotonic() + 30
    while True:
        knows, has = known(gateway), [engine.held() for engine in engines]
        is_same = all(blocks == held and keys == len(held) for (blocks, keys), held in zip(knows, has))
        if is_same or time.monotonic() > until:
            counts = [f"{len(blocks)} known, {keys} keys, {len(held)} there" for (blocks, keys), held in zip(knows, has)]
            return is_same, "; ".join(counts)
        time.sleep(1)


def mixed(gateway, cut):
    """Several hundred requests of several kinds, six at a time; `cut` is called with how many are done."""
    source = random.Random(1)
    systems = [words(source, 60) for _ in range(4)]
    bodies = []
    for _ in range(REQUESTS):
        kind = source.randrange(10)
        text = source.choice(systems) + words(source, source.randrange(5, 60))
        if kind < 6:
            bodies.append(("chat/completions", chat(text, source.randrange(1, 40))))
        elif kind < 8:
            prompt = [source.randrange(5, 500) for _ in range(source.randrange(1, 400))]
            body = {"model": "m", "prompt": prompt, "max_tokens": 3, "temperature": 0}
            bodies.append(("completions", body))
        elif kind < 9:
            bodies.append(("chat/completions", chat(text, 8, cache_salt=words(source, 1))))
        else:
            # the same at once, so that an engine computes it twice
            bodies += [("chat/completions", chat(text, 4))] * 3
    done, failed = 0, []
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(call, gateway.address, "POST", f"/v1/{path}", body, 120) for path, body in bodies]
        for answer in asked:
            status, _, text = answer.result()
            if status != 200:
                failed.append((status, text))
            done += 1
            cut(done / len(bodies))
    return len(bodies), failed


def predictions(gateway):
    """Of conversations, one turn after the other: the cached tokens that were predicted, and those that were told."""
    source = random.Random(2)
    pairs = []
    for _ in range(4):
        messages = []
        for _ in range(4):
            messages.append({"role": "user", "content": words(source, 40)})
            _, headers, text = call(gateway.address, "POST", "/v1/chat/completions", chat(messages, 20))
            answer = json.loads(text)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            explained = json.loads(call(gateway.address, "GET", "/debug/placement/" + headers["x-request-id"])[2])
            chosen = next(one for one in explained["candidates"] if one["outcome"]["outcome"] == "chosen")
            pairs.append((chosen["terms"]["cached_tokens"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]))
            # the engine tells of the answer's blocks in its next step
            time.sleep(0.3)
    return pairs


def conversations(gateway, seed):
    """Times to the first token of all turns, and the cached share of their prompts; two conversations at a time."""
    source = random.Random(seed)
    texts = [[words(source, 250)] + [words(source, 25) for _ in range(4)] for _ in range(8)]
    order = random.Random(7)

    def converse(turns):
        messages, times = [], []
        for text in turns:
            messages.append({"role": "user", "content": text})
            stream = Stream(gateway.address, chat(messages, 12, stream=True, stream_options={"include_usage": True}),
                            threading.Semaphore(0))
            stream.join(timeout=120)
            check_quietly(stream.done, f"an answer is not complete: {stream.error}")
            messages.append({"role": "assistant", "content": stream.text})
            usage = stream.usage
            times.append((stream.first_s, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]))
            time.sleep(0.2 * order.random())
        return times

    with ThreadPoolExecutor(2) as pool:
        return [turn for turns in pool.map(converse, texts) for turn in turns]


def check_quietly(holds, what):
    if not holds:
        check(False, what)


def killed_in_streams(gateway, engine, count, limit_s, what):
    """Kills an engine in the middle of `count` streams, each of which must be whole all the same."""
    started = threading.Semaphore(0)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    texts = [f"Count for me, number {at}." for at in range(count)]
    streams = [Stream(gateway.address, chat(text, 200, **options), started) for text in texts]
    for _ in range(10 * count):
        started.acquire(timeout=60)
    running = sum(not stream.done for stream in streams)
    engine.kill()
    for stream in streams:
        stream.join(timeout=limit_s)
    check(running == count, what)
    for stream in streams:
        whole = stream.done and stream.finish == "length" and stream.usage["completion_tokens"] == 200
        check(whole and len(stream.ids) == 1, f"a whole answer: {stream.usage} {stream.error or ''}")


def record(model, folder):
    """Writes what a server with a small cache sends to a subscriber and as a replay, and what it holds at the end."""
    engine = Engine(model, f"{folder}/vllm.log", blocks=8, context=160)
    try:
        engine.wait()
        port = lambda words: int(words.rsplit(":", 1)[1])
        relays = [Relay(port(engine.events), f"{folder}/events.bin"), Relay(port(engine.replay), f"{folder}/replay.bin")]
        sub = zmq.Context.instance().socket(zmq.SUB)
        sub.connect(f"tcp://127.0.0.1:{relays[0].own_port}")
        sub.subscribe(b"")
        time.sleep(1)

        def ask(prompt, tokens, **more):
            body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
            check(call(engine.address, "POST", "/v1/completions", body)[0] == 200, "a request is answered")

        ask(list(range(10, 60)), 40)
        ask(list(range(10, 60)), 4, cache_salt="pepper")
        for first in (100, 200, 300):
            ask(list(range(first, first + 70)), 2)
        call(engine.address, "POST", "/reset_prefix_cache")
        ask(list(range(10, 110)), 2)
        ask(list(range(10, 80)) + list(range(300, 340)), 2)
        payloads = engine.replayed()
        heard = 0
        while sub.poll(2000):
            sub.recv_multipart()
            heard += 1
        sub.close(linger=0)
        check(heard == len(payloads), f"{heard} batches were recorded")
        engine.replay = f"tcp://127.0.0.1:{relays[1].own_port}"
        check(engine.replayed() == payloads, "and their replay")
        text = json.dumps({"batches": len(payloads), "held": sorted(engine.held())})
        pathlib.Path(f"{folder}/held.json").write_text(text + "\n")
    finally:
        engine.kill()


def main(program, model, folder, *steps):
    if program == "record":
        return record(model, folder)
    steps = steps or ("events", "pd")
    if not {"events", "pd"}.issuperset(steps):
        sys.exit(f"unknown steps: {' '.join(steps)}; known: events pd")
    if "events" in steps:
        alive([Engine(model, f"{folder}/vllm-0.log"),
               # this one connects to the listener
               Engine(model, f"{folder}/vllm-1.log", f"tcp://127.0.0.1:{free_port()}")], program, run)
    if "pd" in steps:
        alive([Engine(model, f"{folder}/vllm-{at}.log", hands_off=True) for at in (2, 3)], program, run_divided)


def alive(engines, program, steps):
    gateways = []
    try:
        for engine in engines:
            engine.wait()
        steps(program, engines, gateways)
    except BaseException:
        if gateways:
            print("".join(gateways[-1].log[-40:]), file=sys.stderr)
        raise
    finally:
        for process in gateways + engines:
            process.stop() if isinstance(process, Gateway) else process.kill()


def run(program, engines, gateways):
    port = lambda words: int(words.rsplit(":", 1)[1])
    events, replay = Relay(port(engines[0].events)), Relay(port(engines[0].replay))
    relayed = f",kv-events=tcp://*:{events.own_port},kv-replay=tcp://127.0.0.1:{replay.own_port}"
    names = [f"vllm:http://{engine.address}" for engine in engines]

    def serve(*words, is_blind=False):
        for gateway in gateways:
            gateway.stop()
        asked = [name + ",kv-events=off" for name in names] if is_blind else [names[0] + relayed, names[1]]
        gateways.append(Gateway(program, asked, *words))
        check_quietly(gateways[-1].wait_for("mixfleet_instances ", 2), "two engines do not serve")
        return gateways[-1]

    gateway = serve()
    status, _, text = call(gateway.address, "POST", "/v1/chat/completions", chat("What is a fleet?", 12))
    check(status == 200 and json.loads(text)["usage"]["completion_tokens"] == 12, "a chat is answered")
    stream = Stream(gateway.address, chat("And a fleet of fleets?", 12, stream=True), threading.Semaphore(0))
    stream.join(timeout=60)
    check(stream.done and stream.finish == "length", "a chat is streamed")

    def cut(share):
        if 0.3 <= share < 0.6 and not events.is_cut:
            events.cut()
            replay.cut()
        elif share >= 0.6 and events.is_cut:
            events.heal()
            replay.heal()

    count, failed = mixed(gateway, cut)
    check(not failed, f"{count} mixed requests are answered {failed[:1]}")
    is_same, counts = same(gateway, engines)
    check(is_same and events.refused > 0, f"what is known equals what a replay of all events tells, after a cut: {counts}")
    lost = [line for line in gateway.log if "are unknown for now" in line]
    check(not lost, f"nothing had to be forgotten for that {lost[:1]}")
    pairs = predictions(gateway)
    right = sum(predicted == told for predicted, told in pairs)
    check(right == len(pairs), f"cached tokens are predicted as the engine tells them, {right} of {len(pairs)}: {pairs}")
    for engine in engines:
        call(engine.address, "POST", "/reset_prefix_cache")
    call(engines[0].address, "POST", "/v1/chat/completions", chat(words(random.Random(3), 60), 2))
    call(engines[1].address, "POST", "/v1/chat/completions", chat(words(random.Random(4), 60), 2))
    is_same, counts = same(gateway, engines)
    check(is_same, f"and after both caches were cleared: {counts}")

    asked = {"model": "m", "messages": [{"role": "user", "content": words(random.Random(5), 300)}]}
    times = []
    for _ in range(50):
        began = time.perf_counter()
        tokens = json.loads(call(engines[0].address, "POST", "/tokenize", asked)[2])["count"]
        times.append(1e3 * (time.perf_counter() - began))
    print(f"        an engine says the ids of {tokens} tokens in {statistics.median(times):.1f} ms (median of 50)", flush=True)

    means, shares = {}, {}
    arms = [("round-robin", "round-robin", False), ("by cost, blind", "per-dollar", True), ("by cost", "per-dollar", False)]
    for turn, (arm, policy, is_blind) in enumerate(arms * 2):
        gateway = serve("--policy", policy, is_blind=is_blind)
        for engine in engines:
            call(engine.address, "POST", "/reset_prefix_cache")
        turns = conversations(gateway, 10 + turn)
        mean = statistics.mean(first for first, _, _ in turns)
        share = sum(cached for _, cached, _ in turns) / sum(length for _, _, length in turns)
        means.setdefault(arm, []).append(mean)
        shares.setdefault(arm, []).append(share)
        print(f"        {arm}: mean TTFT {1e3 * mean:.0f} ms over {len(turns)} turns, {100 * share:.0f} % of prompts cached", flush=True)
    robin, blind, aware = (statistics.mean(means[arm]) for arm, _, _ in arms)
    most = max(share for arm in shares if arm != "by cost" for share in shares[arm])
    check(min(shares["by cost"]) > most, "more of the prompts is cached where requests are placed by what is known")
    words_of = f"{1e3 * aware:.0f} ms against {1e3 * robin:.0f} ms in turn ({1e3 * blind:.0f} ms by cost without events)"
    check(aware < robin, f"and their mean TTFT is shorter: {words_of}")

    gateway = serve("--policy", "round-robin")
    killed_in_streams(gateway, engines[0], 4, 180, "an engine was killed while all answers ran")
    check(gateway.wait_for("mixfleet_instances ", 1), "one engine is left")
    engines[0].start()
    engines[0].wait()
    check(gateway.wait_for("mixfleet_instances ", 2), "the killed one is started again and serves")
    for at in range(10):
        call(gateway.address, "POST", "/v1/chat/completions", chat(words(random.Random(at), 40), 8))
    is_same, counts = same(gateway, engines)
    check(is_same, f"and what it has since then is known: {counts}")


def run_divided(program, engines, gateways):
    """One engine computes prompts, the other one pulls their KV (NIXL) and answers."""
    first, second = engines
    armed = []

    def before(data):
        # the answer is requested: its prompt's KV is not pulled yet
        if armed and b'"do_remote_prefill":true' in data.replace(b" ", b""):
            first.signal(armed.pop())

    way = Relay(int(second.address.rsplit(":", 1)[1]), before=before)
    names = [f"vllm:http://{first.address}=prefill", f"vllm:http://127.0.0.1:{way.own_port}=decode"]
    gateways.append(Gateway(program, names, "--kv-canary=off"))
    gateway = gateways[0]
    check(gateway.wait_for("mixfleet_instances ", 2), "an engine for prompts and one for answers serve")
    source = random.Random(20)

    def clear():
        for engine in engines:
            call(engine.address, "POST", "/reset_prefix_cache")

    def completion(length):
        prompt = [source.randrange(5, 500) for _ in range(length)]
        return {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}

    def ids(address, body):
        began = time.perf_counter()
        status, headers, text = call(address, "POST", "/v1/completions", body, 300)
        check_quietly(status == 200, f"a completion is not answered: {status} {text}")
        choice = json.loads(text)["choices"][0]
        check_quietly(len(choice["token_ids"]) == 24, f"an answer is not whole: {text}")
        return choice["token_ids"], time.perf_counter() - began, headers

    # alone, on one engine; what it has cached is forgotten, so that all of it is computed and pulled again
    bodies = [completion(source.randrange(40, 900)) for _ in range(20)]
    chats = [chat(words(source, source.randrange(10, 120)), 24, stream_options={"include_usage": True}) for _ in range(20)]
    clear()
    alone = [ids(first.address, body)[0] for body in bodies]

    def streamed(address):
        streams = [Stream(address, {**body, "stream": True}, threading.Semaphore(0)) for body in chats]
        for stream in streams:
            stream.join(timeout=300)
            check_quietly(stream.done, f"a stream is not complete: {stream.error}")
        return [(stream.text, stream.usage["completion_tokens"], stream.usage["prompt_tokens"]) for stream in streams]

    spoken = streamed(first.address)
    clear()
    pulled, tokens = second.metric("vllm:nixl_bytes_transferred_sum"), second.metric("vllm:external_prefix_cache_hits_total")
    divided = [ids(gateway.address, body)[0] for body in bodies]
    equal = sum(one == other for one, other in zip(alone, divided))
    check(equal == 20, f"{equal} of 20 answers to prompts of 40 to 900 tokens, divided, have the tokens of one engine's")
    equal = sum(one == other for one, other in zip(spoken, streamed(gateway.address)))
    check(equal == 20, f"{equal} of 20 streams at once, divided, have the text and lengths of one engine's")
    count = gateway.metric("mixfleet_hand_offs_total")
    check(count == 40, f"{count:.0f} of 40 answers began with the other engine's KV")
    failures = gateway.metric("mixfleet_hand_off_failures_total") + second.metric("vllm:nixl_num_failed_transfers_total")
    check(failures == 0, "no hand-off failed")
    pulled = second.metric("vllm:nixl_bytes_transferred_sum") - pulled
    tokens = second.metric("vllm:external_prefix_cache_hits_total") - tokens
    check(pulled > 0 and tokens > 0, f"the second engine pulled {pulled / 1e6:.1f} MB, the KV of {tokens:.0f} tokens")
    transfers = second.metric("vllm:nixl_xfer_time_seconds_count")
    mean = second.metric("vllm:nixl_xfer_time_seconds_sum") / transfers
    print(f"        a pull takes {1e3 * mean:.1f} ms (mean of {transfers:.0f}, as vLLM tells)", flush=True)
    is_same, counts = same(gateway, engines)
    check(is_same, f"what is known of both caches equals what they tell: {counts}")
    body = {**completion(600), "max_tokens": 24}
    clear()
    times = {"divided": [], "one engine": []}
    for _ in range(5):
        for arm, address in (("divided", gateway.address), ("one engine", second.address)):
            clear()
            times[arm].append(ids(address, body)[1])
    print("        600 tokens and 24 more: " + ", ".join(
        f"{1e3 * statistics.median(took):.0f} ms {arm}" for arm, took in times.items()) + " (medians of 5)", flush=True)

    def fails(number, stream, what):
        """The first engine gets a signal once it has answered, before its KV is pulled."""
        clear()
        armed.append(number)
        began = time.perf_counter()
        if stream:
            body = chat(words(source, 60), 24, stream=True, stream_options={"include_usage": True})
            said = Stream(gateway.address, body, threading.Semaphore(0))
            said.join(timeout=300)
            got, wanted = said.text, None
            check_quietly(said.done and said.usage["completion_tokens"] == 24, f"a stream is not whole: {said.error}")
        else:
            body = completion(300)
            got = ids(gateway.address, body)[0]
        took = time.perf_counter() - began
        check_quietly(not armed, "the prompt's KV was not handed over")
        if stream:
            again = Stream(second.address, body, threading.Semaphore(0))
            again.join(timeout=300)
            wanted = again.text
        else:
            wanted = ids(second.address, body)[0]
        check(got == wanted and took < 100, f"{what}: the whole answer, as of one engine, in {took:.1f} s")

    def back():
        check_quietly(gateway.wait_for("mixfleet_instances ", 2), "the first engine is not back")
        until = time.monotonic() + 120
        before = gateway.metric("mixfleet_hand_offs_total")
        while gateway.metric("mixfleet_hand_offs_total") == before and time.monotonic() < until:
            ids(gateway.address, completion(100))
        check(gateway.metric("mixfleet_hand_offs_total") > before, "once it is back, requests are divided again")

    for stream in (True, False):
        form = "stream" if stream else "whole answer"
        fails(signal.SIGSTOP, stream, f"the first engine is stopped before its KV is pulled ({form})")
        first.signal(signal.SIGCONT)
        back()
    fails(signal.SIGKILL, False, "it is killed before its KV is pulled")
    got = ids(gateway.address, bodies[0])[0]
    check(got == alone[0], "without it, the second engine computes prompts too")
    first.kill()
    first.start()
    first.wait()
    back()
    killed_in_streams(gateway, second, 3, 300, "the second engine is killed while three answers run")


if __name__ == "__main__":
    main(*sys.argv[1:])
