#!/usr/bin/env bash
# Measures how much pulling a prefix saves: three prompts that return in turn to a prefill worker with little
# KV memory, while the decode worker still holds them. Two routers of the same workers take turns, one with
# --no-pull. Prints medians in ms and the pulled tokens. Exit status: 0 measured, 1 the answers differ or
# nothing was pulled, 3 could not run (says SKIPPED and why).
#
#   hwtests/pulls.sh [MODEL]          a checkpoint directory; the built-in model otherwise
#
# MIXFLEET names the binary (default target/release/mixfleet, with the feature fleet), TOKENS the prompts' length (1500), ROUNDS how often
# each returns (6).
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in --help) sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit 0 ;; esac

skip() { echo "SKIPPED: pulls: $1" >&2; exit 3; }
program=${MIXFLEET:-target/release/mixfleet}
for tool in etcd python3; do
    command -v "$tool" >/dev/null || skip "no $tool (Debian: etcd-server python3)"
done
"$program" worker --help >/dev/null 2>&1 || skip "no $program with the feature fleet; see docs/how-to/run-a-fleet.md"

work=$(mktemp -d)
processes=()
finish() {
    for process in "${processes[@]}"; do kill "$process" 2>/dev/null || true; done
    wait 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT
run() {
    local log=$1
    shift
    "$@" >"$work/$log" 2>&1 &
    processes+=($!)
}

mkdir -m 700 "$work/etcd"
run log-etcd etcd --data-dir "$work/etcd" --listen-client-urls http://127.0.0.1:23790 --advertise-client-urls http://127.0.0.1:23790 \
    --listen-peer-urls http://127.0.0.1:23791
model=(${1:+--model "$1"})
join=(--etcd http://127.0.0.1:23790)
run prefill "$program" worker "${model[@]}" "${join[@]}" --device cpu@0 --role prefill --kv-memory "${KV_GIB:-0.005}"
run decode "$program" worker "${model[@]}" "${join[@]}" --device cpu@1 --role decode
run pulls "$program" router "${model[@]}" "${join[@]}" --listen 127.0.0.1:8091 --name m
run computes "$program" router "${model[@]}" "${join[@]}" --listen 127.0.0.1:8092 --name m --no-pull
for log in pulls computes; do
    for _ in $(seq 600); do
        [ "$(grep -c 'uses a worker process' "$work/$log")" -ge 2 ] && break
        sleep 0.2
    done
    [ "$(grep -c 'uses a worker process' "$work/$log")" -ge 2 ] || { tail -n 3 "$work"/* >&2; skip "the fleet does not come up"; }
done
python3 - "${TOKENS:-1500}" "${ROUNDS:-6}" <<'PYTHON'
import json, random, statistics, sys, time, urllib.request

tokens, rounds = map(int, sys.argv[1:])
draw = random.Random(1)
prompts = [[draw.randrange(1, 200) for _ in range(tokens)] for _ in range(3)]
routers = {"pulls": 8091, "computes": 8092}


def ask(port, prompt):
    body = {"model": "m", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    url, header = f"http://127.0.0.1:{port}/v1/completions", {"content-type": "application/json"}
    began = time.monotonic()
    answer = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), header), timeout=600))
    return 1e3 * (time.monotonic() - began), answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


times, cached, answers = {name: [] for name in routers}, {name: [] for name in routers}, {}
for round in range(rounds + 1):
    for at, prompt in enumerate(prompts):
        for name, port in routers.items():
            # Between the two another prompt comes, so that the prefill worker has given this one up.
            for returns in [at, (at + 1) % 3, (at + 2) % 3]:
                took, text, known = ask(port, prompts[returns])
                if answers.setdefault(returns, text) != text:
                    sys.exit(f"prompt {returns}: {name} answers otherwise")
                if round > 0:
                    times[name].append(took)
                    cached[name].append(known)
for name in routers:
    some = sorted(times[name])
    print(f"{name}: {statistics.median(some):.0f} ms ({some[0]:.0f} to {some[-1]:.0f}), {len(some)} prompts of {tokens} tokens, "
          f"{statistics.median(cached[name]):.0f} prefix-cache hits")
print(f"ratio {statistics.median(times['computes']) / statistics.median(times['pulls']):.1f}")
sys.exit(0 if statistics.median(cached["pulls"]) > tokens / 2 else 1)
PYTHON
