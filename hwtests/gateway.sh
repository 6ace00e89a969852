#!/usr/bin/env bash
# What a gateway adds to requests: `mixfleet serve` and, where they install, other routers between the same load and the same
# engines that are none, beside the load sent to those engines directly, all in one run. Prints a table and one JSON document
# a row. Exit status: 0 measured, 1 failed, 2 usage, 3 could not run (says SKIPPED and why).
#
#   hwtests/gateway.sh [--peers] [--seconds N] [--rounds N]
#
# --peers installs vllm-router, smg and sglang-router (25 to 40 MB each) into target/gateway and measures them too.
# MIXFLEET names the binary (default target/release/mixfleet), LOAD the generator (default
# target/release/examples/gateway_load, built by cargo build --release -p mixfleet-engines --example gateway_load).
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "SKIPPED: gateway: $1" >&2; exit 3; }
peers=() arguments=()
while [ $# -gt 0 ]; do
    case $1 in
    --peers) peers=(vllm-router==0.1.17 smg==1.13.0 sglang-router==0.3.2) ;;
    --seconds | --rounds) [ $# -ge 2 ] || exit 2; arguments+=("$1" "$2"); shift ;;
    *) sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "$0"; [ "$1" = --help ] && exit 0; exit 2 ;;
    esac
    shift
done
program=${MIXFLEET:-target/release/mixfleet}
load=${LOAD:-target/release/examples/gateway_load}
"$program" serve --help >/dev/null 2>&1 || skip "no $program; build it with cargo build --release"
[ -x "$load" ] || skip "no $load; build it with cargo build --release -p mixfleet-engines --example gateway_load"

packages=target/gateway
for peer in "${peers[@]}"; do
    name=${peer%%==*}
    [ -e "$packages/$name/complete" ] && continue
    rm -rf "${packages:?}/$name"
    mkdir -p "$packages/$name"
    # other requirements of the package serve unused features; its launcher imports these
    get() { python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target "$packages/$name" "$@"; }
    if { get --no-deps "$peer" && get setproctitle requests aiohttp orjson uvicorn fastapi PyYAML; } 2>"$packages/$name/log"; then
        touch "$packages/$name/complete"
    else
        echo "not measured: $peer cannot be installed: $(tail -n 1 "$packages/$name/log")" >&2
    fi
done
exec python3 -B hwtests/gateway/bench.py "$program" "$load" "$packages" "${arguments[@]}"
