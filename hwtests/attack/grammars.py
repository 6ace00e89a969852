"""Grammars that recurse, double or fill memory while they are compiled, beside a stream that must not pause."""

import json
import socket
import time

from common import Checks, Fleet, Pauses, Server, children, program_and_full

# The promised bounds are 1 s, 50 ms and 100 MB; the time limit leaves room for a busy machine.
ANSWER_S_MAX = 15.0
PAUSE_S_MAX = 2.0
RSS_GROWTH_MB_MAX = 100


def chain(rules):
    lines = ["start: r0"] + [f'r{at}: "a" r{at + 1}' for at in range(rules)] + [f'r{rules}: "b"']
    return {"guided_grammar": "\n".join(lines) + "\n"}


def nested(depth):
    return {"guided_grammar": "start: " + "(" * depth + '"a"' + ")" * depth + "\n"}


def references(count):
    definitions = {f"d{at}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{at + 1}"}}} for at in range(count)}
    definitions[f"d{count}"] = {}
    return {"guided_json": {"$ref": "#/$defs/d0", "$defs": definitions}}


def flat(properties, required=False):
    names = [f"p{at}" for at in range(properties)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    return {"guided_json": {**schema, "required": names} if required else schema}


def doubled(times, leaf="/[a-z]+[0-9]?/", name="T"):
    lines = [f"start: {name}0"] + [f"{name}{at}: {name}{at + 1} {name}{at + 1}" for at in range(times)]
    return {"guided_grammar": "\n".join(lines + [f"{name}{times}: {leaf}"]) + "\n"}


def all_of(times):
    definitions = {f"d{at}": {"allOf": [{"$ref": f"#/$defs/d{at + 1}"}, {"$ref": f"#/$defs/d{at + 1}"}]} for at in range(times)}
    definitions[f"d{times}"] = {"type": "string", "pattern": "(a|b)*[0-9]{3}"}
    return {"guided_json": {"$ref": "#/$defs/d0", "$defs": definitions}}


def attacks(full):
    """Each grammar that ended or hung a server, its neighbours, and sizes up to the largest that is read."""
    found = {
        "a chain of 656 rules": chain(656),
        "a chain of 1,900 rules": chain(1900),
        "a chain of 9,000 rules": chain(9000),
        "648 references": references(648),
        "999 references": references(999),
        "a flat schema of 6,751 properties": flat(6751),
        "a flat schema of 4,900 properties": flat(4900),
        "a flat schema of 4,900 required properties": flat(4900, True),
        "4,000 parentheses": nested(4000),
        "100,000 parentheses": nested(100_000),
        "16 doublings of a regular expression": doubled(16),
        "16 doublings of a long one": doubled(16, "/(a|b|cd|[e-z]{1,9}x?)*[0-9]{3,7}(.|\\n)*z/"),
        "40 doublings": doubled(40),
        "30 doublings of rules": doubled(30, name="r"),
        "30 doublings by allOf": all_of(30),
        "repetitions within repetitions": {"guided_regex": "((a{1,500}b){1,500}c){1,500}"},
        "dots before a distant letter": {"guided_regex": "(.*a.{2000}|.*b.{1900})*"},
        "256 KiB of alternatives": {"guided_grammar": "start: " + " | ".join(f'"{at:x}"' for at in range(26_000)) + "\n"},
        "256 KiB of a regular expression": {"guided_regex": "(a|b)?" * 43_600},
    }
    sizes = [1, 4, 16, 64, 256] if full else [4, 64]
    for kib in sizes:
        found[f"a chain of {kib} KiB"] = chain(kib * 1024 // 20)
        found[f"a flat schema of {kib} KiB"] = flat(kib * 1024 // 26)
        found[f"references of {kib} KiB"] = references(kib * 1024 // 85)
    return found


def leave_early(server, body):
    """Sends a request and closes the connection before its answer."""
    host, port = server.address.split(":")
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {server.address}\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + text)
        time.sleep(0.05)


def attack_fleet(checks, program):
    """A worker of a fleet gets grammars that its router has compiled, and streams beside them."""
    fleet = Fleet(program, "cpu@0")
    pauses = Pauses(fleet.router, max_tokens=1500)
    pauses.first.wait(60)
    checks.check(pauses.tokens > 0 and not pauses.error, f"a stream runs in a fleet beside the attack {pauses.error or ''}")
    pauses.pause_s_max = 0.0
    body = {**pauses.body, "stream": False, "max_tokens": 4, "ignore_eos": False}
    for name, grammar in {"700 properties": flat(700), "600 references": references(600), "1,900 rules": chain(1900)}.items():
        status, said = fleet.router.ask("POST", "/v1/completions", {**body, **grammar}, timeout=30)
        checks.check(status in (200, 400, 429), f"{name} in a fleet: {status} {'' if status == 200 else said[:120]}")
    pause_s = pauses.end()
    checks.check(fleet.alive(), "router and worker live")
    checks.check(pause_s < PAUSE_S_MAX, f"the longest pause in a fleet was {pause_s * 1e3:.0f} ms (50 are promised)")
    fleet.stop()


def main():
    program, full = program_and_full()
    checks = Checks()
    if Fleet.is_possible(program):
        attack_fleet(checks, program)
    else:
        print("SKIPPED: attack: grammars in a fleet: no etcd, or a build without the feature 'fleet'")
    server = Server(program, "--device", "cpu@0")
    pauses = Pauses(server, max_tokens=1500)
    pauses.first.wait(60)
    checks.check(pauses.tokens > 0 and not pauses.error, f"a stream runs beside the attack {pauses.error or ''}")
    body = {**pauses.body, "stream": False, "max_tokens": 4, "ignore_eos": False}
    # what a first grammar costs once is not the attack's
    status, said = server.ask("POST", "/v1/completions", {**body, "guided_regex": "a+"})
    checks.check(status == 200, f"a small grammar is answered ({status} {said[:80]})")
    rss_mb, slowest_s = server.rss_mb(), 0.0
    pauses.pause_s_max = 0.0
    for name, grammar in attacks(full).items():
        began = time.perf_counter()
        status, said = server.ask("POST", "/v1/completions", {**body, **grammar}, timeout=30)
        took_s = time.perf_counter() - began
        slowest_s = max(slowest_s, took_s)
        cause = json.loads(said)["error"]["message"][:90] if status == 400 else ""
        # 429: the machine is too busy to try it in time
        checks.check(status in (200, 400, 429), f"{name}: {status} in {took_s:.2f} s {cause}{'' if status else said}")
        if not checks.check(server.alive(), f"{name}: the server lives"):
            checks.end()
    checks.check(slowest_s < ANSWER_S_MAX, f"the slowest answer took {slowest_s:.2f} s (1 s is promised)")
    for at in range(300 if full else 80):
        # small texts that each take much memory
        server.ask("POST", "/v1/completions", {**body, **doubled(13, f"/(k{at}|[a-z]+)[0-9]?/")}, timeout=30)
    grown_mb = server.rss_mb() - rss_mb
    checks.check(grown_mb < RSS_GROWTH_MB_MAX, f"resident memory grew by {grown_mb:.0f} MB (100 are promised)")
    for _ in range(8):
        leave_early(server, {**body, **doubled(16)})
    until = time.monotonic() + 5
    while children(server.process.pid) and time.monotonic() < until:
        time.sleep(0.05)
    checks.check(not children(server.process.pid), "no child stays when clients have left")
    pause_s = pauses.end()
    checks.check(pauses.error is None, f"the stream beside the attack goes on {pauses.error or ''}")
    checks.check(pause_s < PAUSE_S_MAX, f"its longest pause was {pause_s * 1e3:.0f} ms (50 are promised)")
    status, _ = server.ask("GET", "/live")
    checks.check(status == 200, "the server is alive")
    server.stop()
    checks.end()


if __name__ == "__main__":
    main()
