#!/usr/bin/env python3
"""What plain TCP sockets move between two processes of this host, out of and into memory that does not fit the caches.

As iperf3 (one thread at the sender, which sends on whatever stream has room), but both ends go through `--memory` bytes
instead of the same buffer over and over. Prints one line of JSON.
"""

import argparse
import json
import mmap
import os
import select
import socket
import threading
import time

HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


def memory(size):
    """Pages that are there, huge ones where the host gives them, as our regions have."""
    pages = mmap.mmap(-1, size)
    if HUGE_PAGES is not None:
        pages.madvise(HUGE_PAGES)
    view = memoryview(pages)
    step = 1 << 20
    for at in range(0, size, step):
        view[at : at + step] = bytes([1]) * min(step, size - at)
    return view


def tuned(stream, options):
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, options.congestion.encode())
    return stream


def pieces(options, number):
    """Where stream `number` reads or writes, for ever."""
    at = number * options.bytes
    while True:
        yield at
        at = (at + options.streams * options.bytes) % options.memory


def receive(stream, view, options, number):
    for at in pieces(options, number):
        end = at + options.bytes
        while at < end:
            count = stream.recv_into(view[at:end])
            if not count:
                return
            at += count


def target(options, listener, report):
    view = memory(options.memory)
    os.write(report, b"ready\n")
    streams = [tuned(listener.accept()[0], options) for _ in range(options.streams)]
    threads = [threading.Thread(target=receive, args=(s, view, options, n)) for n, s in enumerate(streams)]
    used = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(report, f"{time.process_time() - used}\n".encode())


def send(options, address):
    """Seconds, bytes and processor seconds."""
    view = memory(options.memory)
    streams = [tuned(socket.create_connection(address), options) for _ in range(options.streams)]
    places, left = {}, {}
    for number, stream in enumerate(streams):
        stream.setblocking(False)
        places[stream], left[stream] = pieces(options, number), view[:0]
    sent, start, used = 0, time.monotonic(), time.process_time()
    while time.monotonic() - start < options.seconds:
        for stream in select.select([], streams, [])[1]:
            if not left[stream]:
                at = next(places[stream])
                left[stream] = view[at : at + options.bytes]
            count = stream.send(left[stream])
            left[stream] = left[stream][count:]
            sent += count
    seconds, used = time.monotonic() - start, time.process_time() - used
    for stream in streams:
        stream.close()
    return seconds, sent, used


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1 << 20, help="of a piece")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--memory", type=int, default=256 << 20)
    parser.add_argument("--congestion", default="reno")
    parser.add_argument("--seconds", type=float, default=1)
    options = parser.parse_args()
    if options.memory % (options.bytes * options.streams):
        parser.error("--memory must hold each stream's pieces equally often")
    listener = socket.create_server(("127.0.0.1", 0))
    told, report = os.pipe()
    child = os.fork()
    if child == 0:
        target(options, listener, report)
        os._exit(0)
    with os.fdopen(told) as lines:
        lines.readline()
        seconds, sent, used = send(options, listener.getsockname())
        target_s = float(lines.readline())
    os.waitpid(child, 0)
    print(json.dumps({
        "schema": "mixfleet.wire_sockets.v1", "gb_per_s": sent / seconds / 1e9, "seconds": seconds,
        "initiator_cpu_s": used, "target_cpu_s": target_s,
    }))


main()
