#!/usr/bin/env python3
"""Moves blocks between two processes with NIXL's UCX backend, as `wire_bench run` does with mixfleet's transports.

nixl_transfer.py --bytes N --batch N --depth N --seconds S [--op write|read]: prints one line of JSON. UCX_TLS in the
environment picks the transport (tcp; by default shared memory between processes of one host).
"""

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time

from nixl._api import nixl_agent, nixl_agent_config

MEMORY_BYTES = 256 << 20


def agent(name):
    memory = mmap.mmap(-1, MEMORY_BYTES)
    memory.write(b"\1" * MEMORY_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    made = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    made.register_memory([(address, MEMORY_BYTES, 0, "")], "DRAM")
    return made, memory, address


def target(path):
    made, memory, address = agent("target")
    with open(path + ".part", "wb") as file:
        file.write(address.to_bytes(8, "little") + made.get_agent_metadata())
    os.rename(path + ".part", path)
    sys.stdin.read()


def cpu_seconds(pid):
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def finish(made, handle):
    while True:
        state = made.check_xfer_state(handle)
        if state == "DONE":
            return
        if state == "ERR":
            raise SystemExit("NIXL: a transfer failed")


def run(options, path, child):
    made, memory, local = agent("initiator")
    while not os.path.exists(path):
        time.sleep(0.01)
    told = open(path, "rb").read()
    remote, name = int.from_bytes(told[:8], "little"), made.add_remote_agent(told[8:])
    slots = MEMORY_BYTES // (options.bytes * options.batch)

    def prepare(slot):
        ranges = [((slot * options.batch + i) * options.bytes, options.bytes, 0) for i in range(options.batch)]
        here, there = ([(base + at, size, dev) for at, size, dev in ranges] for base in (local, remote))
        descs = made.get_xfer_descs(here, "DRAM"), made.get_xfer_descs(there, "DRAM")
        return made.initialize_xfer(options.op.upper(), *descs, name)

    # prepared once and used again, as NIXL is meant to be: preparing is not in the time
    handles = [prepare(slot) for slot in range(min(slots, 64))]
    for handle in handles:
        made.transfer(handle)
        finish(made, handle)
    own = time.process_time()
    others = cpu_seconds(child.pid)
    start, under, latencies, at = time.perf_counter(), [], [], 0
    while time.perf_counter() - start < options.seconds or under:
        if time.perf_counter() - start < options.seconds and len(under) < min(options.depth, len(handles)):
            handle = handles[at % len(handles)]
            at += 1
            under.append((time.perf_counter(), handle))
            made.transfer(handle)
            continue
        since, handle = under.pop(0)
        finish(made, handle)
        latencies.append(time.perf_counter() - since)
    seconds = time.perf_counter() - start
    latencies.sort()
    moved = len(latencies) * options.bytes * options.batch
    print(json.dumps({
        "bytes": options.bytes, "batch": options.batch, "depth": options.depth, "gb_per_s": moved / seconds / 1e9,
        "latency_us_p50": latencies[len(latencies) // 2] * 1e6, "latency_us_p99": latencies[len(latencies) * 99 // 100] * 1e6,
        "initiator_cpu_s": time.process_time() - own, "target_cpu_s": cpu_seconds(child.pid) - others, "seconds": seconds,
    }), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1 << 20)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1)
    parser.add_argument("--op", default="write")
    parser.add_argument("--target")
    options = parser.parse_args()
    if options.target:
        return target(options.target)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "metadata")
        command = [sys.executable, __file__, "--target", path]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        try:
            run(options, path, child)
        finally:
            child.kill()
    sys.stdout.flush()
    # UCX may wait for the peer that is gone
    os._exit(0)


main()
