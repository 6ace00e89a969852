"""What breaks, and when."""

import random
import signal
import time

import world

KILL_EVERY_S, CUT_EVERY_S, HANG_EVERY_S, ROUTER_EVERY_S = 10, 30, 30, 60
CUT_S, HANG_S = 5, 5
RESTART_AFTER_S = 0.5


def schedule(seconds, seed):
    """`(at_s, kind, who)` by rising time. A worker dies every 10 s, a link is cut every 30 s, a worker hangs every 30 s,
    a router dies every minute: never two of the last three together."""
    rng = random.Random(seed)
    planned = []
    bags = {}

    def draw(kind, names):
        bag = bags.setdefault(kind, [])
        if not bag:
            bag.extend(names)
            rng.shuffle(bag)
        return bag.pop()

    for kind, first, every, names in (
        ("kill", 3, KILL_EVERY_S, list(world.WORKERS)),
        ("cut", 6, CUT_EVERY_S, [(host, how) for host in world.HOSTS for how in ("unplug", "swallow")]),
        ("hang", 16, HANG_EVERY_S, list(world.WORKERS)),
        ("kill-router", 28, ROUTER_EVERY_S, list(world.ROUTERS)),
    ):
        at_s = first
        while at_s < seconds:
            planned.append((at_s, kind, draw(kind, names)))
            at_s += every
    return sorted(planned, key=lambda fault: fault[0])


class Faults:
    """Carries a schedule out, and writes down when each fault really began and ended."""

    def __init__(self, fleet):
        self.fleet = fleet
        self.done = []
        self.failed = None

    def run(self, planned, stop):
        begun = time.monotonic()
        pending = [(at_s, "begin", (kind, who)) for at_s, kind, who in planned]
        while pending:
            pending.sort(key=lambda entry: entry[0])
            at_s, phase, what = pending.pop(0)
            stopping = stop.wait(max(0.0, begun + at_s - time.monotonic()))
            if stopping and phase == "begin":
                continue
            try:
                if phase == "begin":
                    after_s, fault = self.begin(*what)
                    pending.append((time.monotonic() - begun + after_s, "end", fault))
                else:
                    self.end(what)
            except Exception as error:
                self.failed = f"{what}: {error}"
                stop.set()
                raise

    def begin(self, kind, who):
        fault = {"kind": kind, "who": who, "at": time.time()}
        self.done.append(fault)
        if kind in ("kill", "kill-router"):
            fault["member"] = self.fleet.members.get(who)
            self.fleet.processes[who].kill()
            return RESTART_AFTER_S, fault
        if kind == "hang":
            fault["member"] = self.fleet.members[who]
            self.fleet.processes[who].signal(signal.SIGSTOP)
            return HANG_S, fault
        host, how = who
        fault["members"] = dict(self.fleet.members)
        {"unplug": self.fleet.network.unplug, "swallow": self.fleet.network.swallow}[how](host)
        return CUT_S, fault

    def end(self, fault):
        kind, who = fault["kind"], fault["who"]
        if kind == "kill":
            self.fleet.start_worker(who)
            self.fleet.joined(who)
        elif kind == "kill-router":
            self.fleet.start_router(who)
            self.fleet.processes[who].says("ready: http://")
        elif kind == "hang":
            self.fleet.processes[who].signal(signal.SIGCONT)
        else:
            self.fleet.network.mend(who[0])
        fault["ended"] = time.time()
