"""What the run says: counts of requests, how soon faults were noticed, how soon throughput was back."""

import world

LOST = "a worker process is lost"
USED = "uses a worker process"
# Throughput counts in windows of so long.
WINDOW_S = 1.0
BACK_SHARE = 0.9


def lost_at(fleet, router, member, after):
    """When a router said that a worker process is lost, for the first time after a moment."""
    times = [line["at"] for line in fleet.words(router)
             if line["at"] >= after and LOST in line["text"] and line["fields"].get("member") == member]
    return min(times, default=None)


def in_use(fleet, router, member, at):
    """Whether a router used a worker process then: after a cut they meet again, which takes a moment."""
    last = None
    for line in fleet.words(router):
        if line["at"] < at and line["fields"].get("member") == member and (LOST in line["text"] or USED in line["text"]):
            last = line
        elif line["at"] < at and '"joined"' in line["text"]:
            # another life of the router
            last = None
    return last is not None and USED in last["text"]


def watched(fleet, fault):
    """`(router, member)` of each loss that must be noticed."""
    kind, who = fault["kind"], fault["who"]
    if kind in ("kill", "hang"):
        return [(router, fault["member"]) for router in world.ROUTERS]
    if kind == "cut":
        host = who[0]
        return [(router, fault["members"][worker]) for router, at in world.ROUTERS.items()
                for worker, (place, _) in world.WORKERS.items() if (at == host) != (place == host)]
    return []


def noticed(fleet, fault):
    """Seconds until the last router stopped using the lost worker; None if one never did."""
    used = [(router, member) for router, member in watched(fleet, fault) if in_use(fleet, router, member, fault["at"])]
    if not used:
        return 0.0 if watched(fleet, fault) else None
    times = [lost_at(fleet, router, member, fault["at"]) for router, member in used]
    if None in times:
        return None
    return max(times) - fault["at"]


def back_s(fault, after_s, ends, rate, until):
    """Seconds from a fault until a window begins, after it was noticed, in which 90 % of the requests are completed."""
    needed = BACK_SHARE * rate * WINDOW_S
    start = fault["at"] + after_s
    while start < until - WINDOW_S:
        if sum(1 for end in ends if start <= end < start + WINDOW_S) >= needed:
            return start - fault["at"]
        start += 0.05
    return None


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def document(fleet, load, faults, count, rate, seed, took_s, machine):
    results = load.results
    outcomes = {kind: sum(1 for r in results if r["outcome"] == kind) for kind in ("right", "wrong", "refused", "lost", "driver")}
    ends = [r["at"] + r["took_s"] for r in results if r["outcome"] == "right"]
    until = max(ends, default=0.0)
    for fault in faults.done:
        fault["noticed_s"] = noticed(fleet, fault)
        fault["back_s"] = back_s(fault, fault["noticed_s"] or 0.0, ends, rate, until)
        # the load was over before a window was
        fault["measured"] = fault["at"] + fleet.lease_s + 5.0 < until
    took = [r["took_s"] for r in results if r["outcome"] == "right"]
    return {
        "schema": "mixfleet.hosts/1",
        "requests": count, "rate_per_s": rate, "seed": seed, "lease_s": fleet.lease_s, "took_s": took_s, "machine": machine,
        "outcomes": {**outcomes, "unasked": count - len(results)},
        "streamed": sum(1 for r in results if r["stream"]),
        "reconnected": sum(1 for r in results if any(not t["unready"] for t in r["tries"])),
        "turned_away_first": sum(1 for r in results if r["outcome"] == "right" and any(t["unready"] for t in r["tries"])),
        # of clients that all waited: above zero, the load was less than it says
        "late_s_max": max((r["late_s"] for r in results), default=0.0),
        "latency_s": {"p50": quantile(took, 0.5), "p99": quantile(took, 0.99), "max": max(took, default=None)},
        "faults": [{key: value for key, value in fault.items() if key != "members"} for fault in faults.done],
        "errors": [{"number": r["number"], "error": r["error"]} for r in results if "error" in r][:50],
        "broken": [{"number": r["number"], **t} for r in results for t in r["tries"]][:200],
    }


def verdicts(report):
    """`(what, value, bound, whether it holds)`."""
    outcomes, lease_s = report["outcomes"], report["lease_s"]
    count = report["requests"]
    yield "wrong answers", outcomes["wrong"], "0", outcomes["wrong"] == 0
    missing = outcomes["lost"] + outcomes["driver"] + outcomes["unasked"]
    yield "neither complete nor a clear error", missing, "0", missing == 0
    yield "clear errors", outcomes["refused"], "0.1 %", outcomes["refused"] <= count / 1000
    for kind, name, bound in (("kill", "killed worker left out", 1.0), ("hang", "hung worker left out", 2.0 * lease_s),
                              ("cut", "cut host left out", 2.0 * lease_s)):
        times = [f["noticed_s"] for f in report["faults"] if f["kind"] == kind and f["measured"]]
        yield from spread(f"{name}, s", times, bound)
    times = [f["back_s"] for f in report["faults"] if f["measured"]]
    yield from spread("throughput back to 90 %, s after the fault", times, 5.0)


def spread(what, times, bound):
    if not times:
        yield what, "no such fault", f"{bound:g}", True
        return
    known = [time for time in times if time is not None]
    if len(known) < len(times):
        yield what, f"never, {len(times) - len(known)} of {len(times)} times", f"{bound:g}", False
        return
    shown = f"median {quantile(known, 0.5):.2f}, most {max(known):.2f} of {len(known)}"
    yield what, shown, f"{bound:g}", max(known) <= bound


def table(report):
    outcomes, latency = report["outcomes"], report["latency_s"]
    kinds = [f["kind"] for f in report["faults"]]
    lines = [
        f"{report['requests']} requests, {report['streamed']} of them streamed, {report['rate_per_s']:g}/s, in {report['took_s']:.0f} s; "
        f"{outcomes['right']} right, {outcomes['wrong']} wrong, {outcomes['refused']} clear errors; {report['reconnected']} reconnected, "
        f"{report['turned_away_first']} served by the other router after a 503",
        f"{kinds.count('kill')} workers killed, {kinds.count('kill-router')} routers killed, {kinds.count('hang')} workers hung, "
        f"{kinds.count('cut')} links cut; lease {report['lease_s']} s",
        f"latency: median {latency['p50'] or 0:.2f} s, p99 {latency['p99'] or 0:.2f} s, most {latency['max'] or 0:.2f} s; "
        f"sent at most {report['late_s_max']:.2f} s late",
        "",
        f"{'what':<42} {'measured':<36} {'at most':<8}",
    ]
    for what, value, bound, holds in verdicts(report):
        lines.append(f"{what:<42} {value!s:<36} {bound:<8} {'ok' if holds else 'FAILED'}")
    return "\n".join(lines)
