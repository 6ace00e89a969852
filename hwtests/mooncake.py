#!/usr/bin/env python3
"""The runs of mooncake.sh: makes the loads, simulates both fleets on each, and compares with the published figures."""
import dataclasses, json, pathlib, random, re, statistics, subprocess, sys

program, conversation, work = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
short = "--short" in sys.argv
FLEETS = pathlib.Path("docs/results/fleets")
BLOCK = 512  # tokens, of the traces
TICK_MS = 3000  # arrivals of the recorded trace are multiples of it, over which --jitter spreads them
TOLERANCE = 0.25
WITHIN = 0.9  # share of requests within both objectives at which a rate passes
TTFT_TIMES, TBT_TIMES = 10, 5  # objectives for simulated and public data, in times of a request alone


@dataclasses.dataclass(frozen=True)
class Assumed:
    """What the papers do not state, and what reruns change."""

    metric: str = "longest10"  # the gaps of a request that count as its TBT
    coupled_caches: bool = False  # whether vLLM reuses prefixes
    divided_caches: bool = True
    batched: int = 256  # sequences of an instance of vLLM
    router: str = "round-robin"  # of vLLM
    chunked: bool = False  # whether vLLM sizes prompts beside decodes to the TBT objective
    decode_s: float = 0.0262  # least time of a decode step of vLLM
    prompt_times: float = 1.0  # the time of prompts over that of figure 14, in both fleets
    speed: float = 1.0  # of the recorded trace
    filled: bool = False  # whether the recorded trace is filled up to the published number of requests


@dataclasses.dataclass(frozen=True)
class Published:
    """A load of section 8.1 with Poisson arrivals, and the rates that passed: highest tested ones, of both fleets."""

    prompt: int
    answer: int
    cached: float
    times: float
    rates: tuple = (None, None)


# Table 2 and figure 12: +525 % is the ratio of the highest tested rates.
SIMULATED = {
    "16K": Published(16384, 512, 0.5, 1.25 / 0.2, (0.2, 1.25)),
    "32K": Published(32768, 512, 0.5, 0.6 / 0.2, (0.2, 0.6)),
    "64K": Published(65536, 512, 0.5, 0.3 / 0.2, (0.2, 0.3)),
    "128K": Published(131072, 512, 0.5, 0.14 / 0.12, (0.12, 0.14)),
}
# Table 2 and figure 11, each prompt and answer of the mean length.
PUBLIC = {
    "ArXiv Summarization": Published(8088, 229, 0.0, 1.2),
    "L-Eval": Published(19019, 72, 0.8, 1.4),
}
# Table 2 and figure 13: requests, mean lengths; shares within the TBT objective of vLLM and Mooncake.
REQUESTS, PROMPT, ANSWER = 23_000, 7955, 194
SHARES = (0.57, 1.0)
# FAST'25, figure 1: TBT objective in seconds, and how many times as many requests Mooncake has within it.
LATER = {0.1: 5.98, 0.2: 2.57, 0.3: 1.59}

# Long prompts one at a time, as section 8.1.2 has vLLM compute them.
ALONE = Assumed(batched=1)
BASE = "as described"
SIMULATED_RERUN = "no prefix is reused"
SIMULATED_BY = {
    BASE: ALONE,
    SIMULATED_RERUN: dataclasses.replace(ALONE, divided_caches=False),
    "both reuse prefixes": dataclasses.replace(ALONE, coupled_caches=True),
    "prompts take twice the time": dataclasses.replace(ALONE, prompt_times=2.0),
    "vLLM batches": Assumed(),
    "vLLM batches, TBT is the mean of all gaps": Assumed(metric="mean"),
    "that, and no prefix is reused": Assumed(metric="mean", divided_caches=False),
}
REPLAY_RERUN = "the trace filled up to 23,000 requests"
REPLAYED_BY = {
    BASE: Assumed(),
    REPLAY_RERUN: Assumed(filled=True),
    "1.24 times the speed: prompt tokens per second as published": Assumed(speed=1.24),
    "vLLM's router picks at random": Assumed(router="random"),
    "vLLM's router knows queues": Assumed(router="least-loaded"),
    "vLLM reuses prefixes": Assumed(coupled_caches=True),
    "a decode step of vLLM takes at least 50 ms": Assumed(decode_s=0.05),
    "TBT is the mean of all gaps": Assumed(metric="mean"),
    "TBT is the 99th percentile of the gaps": Assumed(metric="p99"),
    "vLLM sizes prompts beside decodes to the TBT objective": Assumed(chunked=True),
    "mixfleet places requests on vLLM and pulls prefixes": Assumed(coupled_caches=True, router="per-dollar"),
}
PUBLIC_BY = {
    BASE: Assumed(),
    "TBT is the mean of all gaps": Assumed(metric="mean"),
    "that, and vLLM reuses prefixes": Assumed(metric="mean", coupled_caches=True),
}
LATER_BY = {BASE: Assumed(), "a decode step of vLLM takes at least 50 ms": Assumed(decode_s=0.05)}


def write(name, requests):
    """The path of a trace of (arrival in ms, prompt, answer, blocks) in the order of arrivals."""
    path = work / name
    with open(path, "w") as file:
        for at, prompt, answer, blocks in requests:
            line = {"timestamp": at, "input_length": prompt, "output_length": answer, "hash_ids": blocks}
            print(json.dumps(line), file=file)
    return path


def unshared(requests):
    """The requests with blocks that no other one has."""
    made, first = [], 0
    for at, prompt, answer, _ in requests:
        blocks = -(-prompt // BLOCK)
        made.append((at, prompt, answer, list(range(first, first + blocks))))
        first += blocks
    return made


def changed(text, pattern, new):
    """A fleet file with other values, which it must have had."""
    text, count = re.subn(f"(?m){pattern}", new, text)
    assert count > 0, f"no {pattern} in the fleet file"
    return text


class Run:
    """One fleet on one load."""

    def __init__(self, name, counts, requests, assumed):
        coupled = name == "coupled"
        text = (FLEETS / f"mooncake-{name}.toml").read_text()
        for seconds in ("0.08", "1.19e-4", "7.467e-10"):
            text = changed(text, re.escape(f"= {seconds}"), f"= {float(seconds) * assumed.prompt_times}")
        if coupled:
            text = changed(text, "base = 0.0262", f"base = {assumed.decode_s}")
            text = changed(text, "max_sequences = .*", f"max_sequences = {assumed.batched}")
        if coupled and assumed.chunked:
            text = changed(text, "max_prefill_tokens_beside_decode = .*", "")
            text = changed(text, "max_batched_tokens = .*", "max_batched_tokens = 2048")
        counts = iter(counts)
        text = changed(text, "^count = .*", lambda _: f"count = {next(counts)}")
        self.text = changed(text, "tbt_metric = .*", f'tbt_metric = "{assumed.metric}"')
        self.file = work / f"{name}.toml"
        caches = assumed.coupled_caches if coupled else assumed.divided_caches
        self.trace = write(f"{name}.jsonl", requests if caches else unshared(requests))
        # Algorithm 1 of FAST'25: a prefix is pulled if it is longer than the own.
        self.placing = ["--policy", assumed.router] if coupled else ["--policy", "kvcache-centric", "--threshold", 1]

    def simulate(self, *options, ttft_s=30.0, tbt_s=0.1):
        text = changed(self.text, "^ttft_s = .*", f"ttft_s = {ttft_s}")
        self.file.write_text(changed(text, "^tbt_s = .*", f"tbt_s = {tbt_s}"))
        words = ["simulate", "--json", "--trace", self.trace, "--fleet", self.file, "--seed", 1, "--admit", "none"]
        done = subprocess.run([program, *map(str, [*words, *self.placing, *options])], capture_output=True, text=True)
        if done.returncode == 1 and "--capacity" in " ".join(map(str, options)):
            return None
        if done.returncode != 0:
            sys.exit(f"mooncake: {done.stderr}")
        return json.loads(done.stdout)

    def capacity(self, *options, **objectives):
        """The highest arrival rate, requests/s, at which nine of ten requests are within both objectives."""
        found = self.simulate(f"--capacity={WITHIN}", *options, **objectives)
        return found["requests_per_s"] if found else 0.0

    def shares(self, speed, tbt_s=0.1):
        """The shares of a recorded load's requests within each objective."""
        run = self.simulate("--jitter", "--speedup", speed, tbt_s=tbt_s)
        missed = run["missed_by"]
        return {name: 1 - missed[name] / run["requests"] for name in ("tbt", "ttft")}


def poisson(load, count, seed):
    """Requests at one per second that share one prefix."""
    draw = random.Random(seed)
    common, all_blocks = int(load.prompt * load.cached) // BLOCK, -(-load.prompt // BLOCK)
    made, first = [], common
    for at in sorted(draw.uniform(0, 1000 * count) for _ in range(count)):
        own = all_blocks - common
        made.append((at, load.prompt, load.answer, [*range(common), *range(first, first + own)]))
        first += own
    return made


def with_poisson_arrivals(load, assumed):
    """The highest rates of [4M] and [3P+1D] within objectives that are multiples of a request alone."""
    count, seeds = (200, [1]) if short else (1000, [1, 2, 3])
    rates = []
    for seed in seeds:
        requests = poisson(load, count, seed)
        runs = [Run("coupled", [4], requests, assumed), Run("divided", [3, 1], requests, assumed)]
        # So far apart that no request meets another, and all but the first find the prefix.
        alone = [run.simulate("--limit", 20, "--speedup", 0.001) for run in runs]
        ttft_s = TTFT_TIMES * min(run["ttft_s"]["p50"] for run in alone)
        tbt_s = TBT_TIMES * min(run["tbt_s"]["p50"] for run in alone)
        rates.append([run.capacity(ttft_s=ttft_s, tbt_s=tbt_s) for run in runs])
    coupled, divided = (statistics.median(of) for of in zip(*rates))
    times = divided / coupled if coupled else None
    made = {"coupled_rps": coupled, "divided_rps": divided, "rps_of_seeds": rates, "ttft_limit_s": ttft_s, "tbt_limit_s": tbt_s}
    return {**made, **compared(times, load.times)}


def by_assumption(loads, assumptions):
    return {
        name: {case: with_poisson_arrivals(load, assumed) for case, load in loads.items()}
        for name, assumed in assumptions.items()
    }


def compared(times, published):
    return {"times": times, "published_times": published, "off": None if times is None else times / published - 1}


def recorded():
    text = subprocess.run(["zstd", "-dc", conversation], capture_output=True, text=True, check=True).stdout
    lines = [json.loads(line) for line in text.splitlines()]
    return [(line["timestamp"], line["input_length"], line["output_length"], line["hash_ids"]) for line in lines]


def filled(requests):
    """The requests and, at random times, short ones that bring number and mean lengths to the published ones."""
    missing = REQUESTS - len(requests)
    lacks = lambda mean, at: round((mean * REQUESTS - sum(request[at] for request in requests)) / missing)
    prompt, answer = lacks(PROMPT, 1), lacks(ANSWER, 2)
    draw, last = random.Random(1), requests[-1][0]
    # One prefix of five blocks, as the shorter system prompt of the published tool requests has.
    first = 1 + max(max(request[3]) for request in requests)
    own = -(-prompt // BLOCK) - 5
    begins = range(first + 5, first + 5 + missing * own, own)
    blocks = [[*range(first, first + 5), *range(begin, begin + own)] for begin in begins]
    others = [(draw.randrange(0, last + 1, TICK_MS), prompt, answer, chain) for chain in blocks]
    return sorted(requests + others, key=lambda request: request[0])


def replayed(requests, assumed):
    """The shares within each objective of [20M] and [10P+10D]."""
    load = filled(requests) if assumed.filled else requests
    load = load[:3000] if short else load
    coupled = Run("coupled", [20], load, assumed).shares(assumed.speed)
    divided = Run("divided", [10, 10], load, assumed).shares(assumed.speed)
    times = compared(divided["tbt"] / coupled["tbt"], SHARES[1] / SHARES[0])
    return {"requests": len(load), "coupled": coupled, "divided": divided, **times}


def sustained(requests):
    """The arrival rates at which nine of ten requests are within both objectives."""
    runs = {"coupled": Run("coupled", [20], requests, Assumed()), "divided": Run("divided", [10, 10], requests, Assumed())}
    return {name: run.capacity("--jitter") for name, run in runs.items()}


def later(requests, assumed):
    """The shares within TBT objectives of 16 instances of vLLM, and of 8 and 8 of Mooncake."""
    coupled, divided = Run("coupled", [16], requests, assumed), Run("divided", [8, 8], requests, assumed)
    made = {}
    for tbt_s, published in LATER.items():
        a, b = (run.shares(1.0, tbt_s)["tbt"] for run in (coupled, divided))
        made[tbt_s] = {"coupled": a, "divided": b, **compared(b / a, published)}
    return made


def row(cells):
    print("| " + " | ".join(cells) + " |")


def heads(title, cells):
    print(f"\n{title}\n")
    row(cells)
    print("|" + "---|" * len(cells))


def signed(value):
    return "-" if value is None else f"{100 * value:+.0f} %"


def gain(times):
    return signed(times and times - 1)


def percent(share):
    return f"{100 * share:.1f} %"


def beside(made):
    return f"{gain(made['times'])} ({signed(made['off'])})"


def print_simulated(made):
    for name in (BASE, SIMULATED_RERUN):
        heads(f"Simulated data, {name}: highest rate within the objectives, requests/s", [
            "prompt", "vLLM [4M], published", "simulated", "Mooncake [3P+1D], published", "simulated", "gain, published",
            "simulated", "times as many, off by"])
        for case, found in made[name].items():
            before, after = SIMULATED[case].rates
            row([case, f"{before:g}", f"{found['coupled_rps']:.3g}", f"{after:g}", f"{found['divided_rps']:.3g}",
                 gain(found["published_times"]), gain(found["times"]), signed(found["off"])])


def print_gains(title, made):
    """Gains by assumption, and how far the times as many requests are off."""
    first = next(iter(made.values()))
    heads(title, ["", *map(str, first)])
    row(["published", *(gain(case["published_times"]) for case in first.values())])
    for name, cases in made.items():
        row([name, *map(beside, cases.values())])


def print_replayed(made, rates):
    heads("Replayed load: requests within the objectives of 30 s and 0.1 s",
          ["", "vLLM [20M]: TBT", "TTFT", "Mooncake [10P+10D]: TBT", "TTFT", "gain", "times as many, off by"])
    row(["published", percent(SHARES[0]), "almost 100 %", "about 100 %", "almost 100 %", gain(SHARES[1] / SHARES[0]), ""])
    for name, found in made.items():
        shares = [percent(found[fleet][which]) for fleet in ("coupled", "divided") for which in ("tbt", "ttft")]
        row([name, *shares, gain(found["times"]), signed(found["off"])])
    if rates:
        print(f"\n{percent(WITHIN)} are within both objectives up to {rates['coupled']:.2f} requests/s on [20M] and "
              f"{rates['divided']:.2f} on [10P+10D].")


def only_short(made, *kept):
    return {name: made[name] for name in kept} if short else made


def main():
    requests = recorded()
    simulated = by_assumption(only_short(SIMULATED, "16K"), only_short(SIMULATED_BY, BASE, SIMULATED_RERUN))
    replays = {name: replayed(requests, to) for name, to in only_short(REPLAYED_BY, BASE, REPLAY_RERUN).items()}
    rates = public = newer = None
    if not short:
        rates = sustained(requests)
        public = by_assumption(PUBLIC, PUBLIC_BY)
        newer = {name: later(requests, to) for name, to in LATER_BY.items()}

    near = lambda found: found["off"] is not None and abs(found["off"]) <= TOLERANCE
    within = {f"simulated data, {name}": all(map(near, simulated[name].values())) for name in (BASE, SIMULATED_RERUN)}
    within |= {f"replayed load, {name}": near(replays[name]) for name in (BASE, REPLAY_RERUN)}
    if "--json" in sys.argv:
        results = {"simulated": simulated, "replayed": replays, "sustained_rps": rates, "public": public, "fast25": newer}
        print(json.dumps({"schema": "mixfleet.mooncake/1", **results, "within": within}, indent=2))
    else:
        print_simulated(simulated)
        print_gains("Gain on simulated data by assumption (times as many, off by)", simulated)
        print_replayed(replays, rates)
        if public:
            print_gains("Gain on public data sets (times as many, off by)", public)
            print_gains("FAST'25: gain by TBT objective in seconds (times as many, off by)", newer)
        print("\nTimes as many requests as vLLM within 25 % of the published:")
        for name, good in within.items():
            print(f"  {name}: {'yes' if good else 'no'}")
    good = list(within.values())
    return 0 if any(good[:2]) and any(good[2:]) else 1


sys.exit(main())
