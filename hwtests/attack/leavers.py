"""Clients leave before their answers end, read or unread; they pay for the tokens computed until then."""

import http.client
import json
import os
import tempfile
import time

import common

KEYS = """
[[tenant]]
name = "leaver"
key = "leaver-key"

[[tenant]]
name = "sleeper"
key = "sleeper-key"

[[tenant]]
name = "whole"
key = "whole-key"
"""
TOKENS = 200


def used(server, name):
    text = server.ask("GET", "/usage", headers={"authorization": f"Bearer {name}-key"})[1]
    return json.loads(text)["data"][0]


def waits(holds, seconds=20):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.05)
    return holds()


def begin(server, model, name, stream, tokens=TOKENS):
    """Sends a request; returns its connection, unread."""
    body = {"model": model, "prompt": list(range(3, 103)), "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    connection = http.client.HTTPConnection(server.address, timeout=common.WAIT_S)
    headers = {"content-type": "application/json", "authorization": f"Bearer {name}-key"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection


def main():
    program, _ = common.program_and_full()
    checks = common.Checks()
    with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as file:
        file.write(KEYS)
    server = common.Server(program, "--device", "cpu", "--api-keys", file.name)
    try:
        key = {"authorization": "Bearer leaver-key"}
        model = json.loads(server.ask("GET", "/v1/models", headers=key)[1])["data"][0]["id"]

        connection = begin(server, model, "leaver", True)
        events = 0
        for line in connection.getresponse():
            events += line.startswith(b"data: {")
            if events >= TOKENS * 9 // 10:
                break
        connection.sock and connection.sock.close()
        connection.close()
        paid = waits(lambda: used(server, "leaver")["completion_tokens"] >= events)
        account = used(server, "leaver")
        checks.check(paid and account["prompt_tokens"] == 100, f"a client that leaves at 90 % of a stream pays: {account}")

        connection = begin(server, model, "sleeper", True)
        connection.getresponse()
        before = server.metric("mixfleet_generation_tokens_total")
        time.sleep(3)
        connection.close()
        waits(lambda: used(server, "sleeper")["requests"] >= 1)
        account = used(server, "sleeper")
        computed = server.metric("mixfleet_generation_tokens_total") - before
        checks.check(account["completion_tokens"] >= TOKENS * 9 // 10, f"a client that reads nothing pays: {account}, {computed}")

        connection = begin(server, model, "whole", False, tokens=3000)
        time.sleep(2)
        connection.close()
        waits(lambda: used(server, "whole")["requests"] >= 1)
        account = used(server, "whole")
        checks.check(account["completion_tokens"] > 20, f"a client that leaves a whole answer pays: {account}")
        checks.check(server.alive(), "the server lives")
    finally:
        server.stop()
        os.unlink(file.name)
    checks.end()


main()
