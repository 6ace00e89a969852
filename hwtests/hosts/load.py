"""Clients: requests at a steady rate, half of them streamed, each checked against the answer of a single device."""

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import world

# A stream's longest silence that is no fault: a lease until a loss is noticed, three for another place.
SILENCE_S_MAX = 10
# To a router that is there, a connection takes milliseconds; balancers wait as long.
CONNECT_S_MAX = 1
# A user's timeout for one request, over all retries.
REQUEST_S_MAX = 60
CLIENTS_MAX = 256


class Refused(Exception):
    """A clear error: the server named the cause."""


class Unready(Refused):
    """503: it cannot serve now. A client, like a balancer, tries the other router first."""


class Broken(Exception):
    """The connection ended or was silent before the answer was whole."""


class Wrong(Exception):
    """Text that one device alone does not give."""


def body(prompt, tokens, stream, salt):
    wanted = {"model": "llama-gqa-f32", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    if salt is not None:
        # nothing of the prompt is in a cache: all of its KV is computed and handed over
        wanted["cache_salt"] = salt
    return json.dumps(wanted)


def ask(address, text, stream, expected):
    """The whole answer; raises on failure."""
    connection = http.client.HTTPConnection(*address, timeout=CONNECT_S_MAX)
    try:
        connection.connect()
        connection.sock.settimeout(SILENCE_S_MAX)
        headers = {"content-type": "application/json", "authorization": f"Bearer {world.API_KEY}", "connection": "close"}
        connection.request("POST", "/v1/completions", text, headers)
        response = connection.getresponse()
        if response.status != 200:
            kind = Unready if response.status == 503 else Refused
            raise kind(f"{response.status}: {response.read().decode(errors='replace')[:500]}")
        if stream:
            return streamed(response, expected)
        answer = json.loads(response.read())
        return answer["choices"][0]["text"]
    except (OSError, http.client.HTTPException, socket.timeout, ValueError) as error:
        raise Broken(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def streamed(response, expected):
    """Every part of a stream must continue what one device alone gives, even if the stream breaks later."""
    got = ""
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            return got
        event = json.loads(data)
        if "error" in event:
            raise Refused(f"in the stream: {event['error']}")
        for choice in event["choices"]:
            got += choice["text"]
        if expected is not None and not expected.startswith(got):
            raise Wrong(f"{got[-80:]!r} does not continue {expected[:len(got)][-80:]!r}")
    raise Broken("the stream ended without [DONE]")


class Load:
    """Requests at even intervals, regardless of slow answers."""

    def __init__(self, routers, cases, rate):
        self.routers, self.cases, self.rate = routers, cases, rate
        self.results = []
        self.lock = threading.Lock()

    def run(self, count, stop):
        """Sends `count` requests; returns when the last is answered."""
        begun = time.monotonic()
        clients = ThreadPoolExecutor(CLIENTS_MAX)
        whole = False
        try:
            for number in range(count):
                wait = begun + number / self.rate - time.monotonic()
                if stop.wait(max(0.0, wait)):
                    return
                clients.submit(self.request, number, begun + number / self.rate)
            whole = True
        finally:
            # an interrupted client sends no further request
            clients.shutdown(wait=True, cancel_futures=not whole)

    def request(self, number, planned):
        case = self.cases[number % len(self.cases)]
        stream = number // len(self.cases) % 2 == 0
        salt = None if number % 3 == 0 else f"request {number}"
        text = body(case["prompt"], case["tokens"], stream, salt)
        result = {"number": number, "at": time.time(), "stream": stream, "tries": [], "outcome": "lost"}
        began = time.monotonic()
        result["late_s"] = began - planned
        try:
            self.tries(number, text, stream, case["text"], result, began)
        except Exception as error:  # a fault of this program must not look like a lost request of the fleet
            result["outcome"], result["error"] = "driver", f"{type(error).__name__}: {error}"
        result["took_s"] = time.monotonic() - began
        with self.lock:
            self.results.append(result)

    def tries(self, number, text, stream, expected, result, began):
        attempt = 0
        while time.monotonic() - began < REQUEST_S_MAX:
            # the other router after every failure
            address = self.routers[(number + attempt) % len(self.routers)]
            attempt += 1
            try:
                got = ask(address, text, stream, expected)
                if got != expected:
                    raise Wrong(f"{got[:80]!r} is not {expected[:80]!r}")
                result["outcome"] = "right"
                return
            except Wrong as error:
                result["outcome"], result["error"] = "wrong", str(error)
                return
            except (Broken, Unready) as error:
                unready = isinstance(error, Unready)
                if unready and result["tries"] and result["tries"][-1]["unready"]:
                    result["outcome"], result["error"] = "refused", str(error)
                    return
                failed = {"router": address[0], "error": str(error), "at_s": time.monotonic() - began, "unready": unready}
                result["tries"].append(failed)
                if unready:
                    continue
                # both routers may be away for a moment
                time.sleep(min(1.0, 0.05 * 2**attempt))
            except Refused as error:
                result["outcome"], result["error"] = "refused", str(error)
                return
