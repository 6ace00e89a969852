#!/usr/bin/env bash
# Three hosts on one machine: network namespaces on a bridge, etcd, two routers, two prefill and two decode workers under
# mutual TLS. Clients stream and reconnect while workers and routers are killed, hung, and links are cut. Every answer is
# held to what one device alone gives. Exit status: 0 passed, 1 a bound was missed, 3 could not run (says SKIPPED and why).
#
#   hwtests/hosts.sh [--requests 300] [--rate 8] [--lease-s 2] [--seed 1] [--calm] [--json FILE] [--keep DIRECTORY]
#
# --calm breaks nothing; --keep keeps the processes' logs. MIXFLEET_PROGRAM names a binary with the feature fleet, which is
# built otherwise. Needs root (for namespaces), iproute2, etcd, openssl, python3.
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "SKIPPED: three hosts: $1" >&2; exit 3; }
case ${1:-} in --help | -h) sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
[ "$(uname -s)" = Linux ] || skip "network namespaces are Linux's"
[ "$(id -u)" = 0 ] || skip "network namespaces need root"
for tool in ip etcd openssl python3; do
    command -v "$tool" >/dev/null || skip "no $tool (Debian: iproute2 etcd-server openssl python3)"
done
probe="mixfleet$$-probe"
ip netns add "$probe" 2>/dev/null || skip "this machine allows no network namespaces"
ip netns del "$probe"
model=../shared/fixtures/llama-gqa-f32
[ -f "$model/golden.json" ] || skip "no fixture checkpoint at $model"

program=${MIXFLEET_PROGRAM:-}
if [ -z "$program" ]; then
    # with the features of test-all.sh, so that what that has built is not built anew
    cargo build --locked --workspace --features mixfleet/full --bin mixfleet
    program="${CARGO_TARGET_DIR:-target}/debug/mixfleet"
fi
exec python3 -B hwtests/hosts/run.py --program "$program" --model "$model" "$@"
