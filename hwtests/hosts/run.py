"""Three hosts, two routers, four workers, and everything that breaks: see ../hosts.sh."""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import faults
import load
import report
import world

TOKENS = (12, 48, 96)


def cases(program, fleet_model, model_flags, scratch):
    """Prompts with the text that one device alone gives; that device is first held to the golden tokens."""
    golden = json.loads((fleet_model / "golden.json").read_text())["cases"]
    address, process = world.alone(program, model_flags, scratch)
    try:
        found = []
        for case in golden:
            ids = ",".join(map(str, case["prompt_ids"]))
            answer = json.loads(world.run(program, "generate", "--json", "--ignore-eos", "--temperature", "0", *model_flags, "--device", "cpu",
                                          "--max-tokens", str(len(case["greedy_ids"])), "--prompt-ids", ids))
            if answer["ids"] != case["greedy_ids"]:
                raise RuntimeError(f"one device alone does not give the golden tokens of prompt {ids}")
            text = load.ask(address, load.body(case["prompt_ids"], len(case["greedy_ids"]), False, None), False, None)
            if text != answer["text"]:
                raise RuntimeError(f"serve and generate differ on prompt {ids}")
        long = [token for case in golden for token in case["prompt_ids"]] * 2
        for prompt in [case["prompt_ids"] for case in golden] + [long, long[::-1]]:
            for tokens in TOKENS:
                text = load.ask(address, load.body(prompt, tokens, False, None), False, None)
                found.append({"prompt": prompt, "tokens": tokens, "text": text})
        return found
    finally:
        process.kill()


def wait_until_served(fleet, expected):
    """Until each router gives each case's answer: all of its workers are reached, and their links measured."""
    for address in fleet.routers():
        for case in expected:
            deadline = time.monotonic() + world.START_S_MAX
            while True:
                try:
                    got = load.ask(address, load.body(case["prompt"], case["tokens"], True, None), True, case["text"])
                    break
                except (load.Refused, load.Broken):
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)
            if got != case["text"]:
                raise load.Wrong("before any fault")


def play(fleet, expected, args):
    """The load under the faults."""
    clients = load.Load(fleet.routers(), expected, args.rate)
    breaking = faults.Faults(fleet)
    over = threading.Event()
    planned = [] if args.calm else faults.schedule(args.requests / args.rate, args.seed)
    breaker = threading.Thread(target=breaking.run, args=(planned, over), daemon=True)
    progress = threading.Thread(target=tell, args=(clients, args.requests, over), daemon=True)
    begun = time.monotonic()
    breaker.start()
    progress.start()
    clients.run(args.requests, over)
    took_s = time.monotonic() - begun
    over.set()
    breaker.join()
    if breaking.failed:
        raise RuntimeError(f"a fault could not be made or ended: {breaking.failed}")
    return report.document(fleet, clients, breaking, args.requests, args.rate, args.seed, took_s, machine())


def tell(clients, count, over):
    while not over.wait(15):
        with clients.lock:
            results = list(clients.results)
        bad = sum(1 for r in results if r["outcome"] != "right")
        print(f"hosts: {len(results)} of {count} answered, {bad} not right", file=sys.stderr, flush=True)


def machine():
    return {"system": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--lease-s", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calm", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    # an external kill also ends its processes and removes its namespaces
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scratch = Path(tempfile.mkdtemp(prefix="mixfleet-hosts-"))
    program = os.path.abspath(args.program)
    fleet = world.World(program, args.model.resolve(), scratch, args.lease_s)
    try:
        expected = cases(program, fleet.model, fleet.model_flags(), scratch)
        fleet.build()
        wait_until_served(fleet, expected)
        print(f"hosts: {len(fleet.status()['members'])} members on three hosts serve; the load begins", file=sys.stderr, flush=True)
        found = play(fleet, expected, args)
    finally:
        fleet.end()
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
            for log in scratch.glob("*.log"):
                shutil.copy(log, args.keep)
        shutil.rmtree(scratch, ignore_errors=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(report.table(found))
    return 0 if all(holds for *_, holds in report.verdicts(found)) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        print(f"hosts: could not run: {error}", file=sys.stderr)
        sys.exit(3)
