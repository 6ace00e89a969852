#!/usr/bin/env bash
# Soaks a server: good clients beside hostile ones, on one machine and its loopback, until the time is over.
#
#   hwtests/soak.sh [--fleet] [--minutes M, default 30] [--clients N, default 200] [--out FILE.json] [--binary FILE]
#
# Starts `mixfleet serve` (two CPU devices, one prefills and one decodes; the built-in model) under `ulimit -n 1024`, and
# watches memory, descriptors, threads and the latency of /live. --fleet soaks a gateway before a router and two workers
# instead, with TLS between them and KV tiers on disk (needs etcd, openssl, the feature `fleet`). Exit codes: 0 all held, 1 something did not, 2 usage,
# 3 could not run. Needs Linux, python3 and two cores.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
binary=$root/target/release/mixfleet
arguments=()
build=1
features=()
usage() {
    echo "soak: $1" >&2
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '$d' >&2
    exit 2
}
while [[ $# -gt 0 ]]; do
    case $1 in
        --minutes | --clients | --out) [[ $# -ge 2 ]] || usage "$1 needs a value"; arguments+=("$1" "$2"); shift 2 ;;
        --fleet) arguments+=("$1"); features=(--features fleet); shift ;;
        --binary) [[ $# -ge 2 ]] || usage "$1 needs a value"; binary=$2 build=0; shift 2 ;;
        *) usage "there is no option $1" ;;
    esac
done
if [[ $build = 1 ]]; then
    (cd "$root" && cargo build --quiet --release -p mixfleet "${features[@]}") || exit 3
fi
exec python3 "$root/hwtests/soak/run.py" --binary "$binary" "${arguments[@]}"
