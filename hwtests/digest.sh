#!/usr/bin/env bash
# What the digest of the weights costs a server: time from its start to the first token, and decoding in the first half minute,
# in pairs of a start that computes the digest and one that finds it kept. Exit status: 0 measured and within bounds, 1 a bound
# was missed, 3 could not run (says SKIPPED and why).
#
#   hwtests/digest.sh MODEL           a checkpoint directory
#
# MIXFLEET names the binary (default target/release/mixfleet), ROUNDS the pairs (5), SECONDS_OF_DECODE how long each decodes (30).
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "SKIPPED: digest: $1" >&2; exit 3; }
model=${1:-}
case $model in
"" | -*) sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "$0"; [ "$model" = --help ] && exit 0; exit 2 ;;
esac
program=${MIXFLEET:-target/release/mixfleet}
command -v python3 >/dev/null || skip "no python3"
[ -f "$model/config.json" ] || skip "no checkpoint in $model; one with random weights will do (hwtests/peers/README.md)"
"$program" serve --help >/dev/null 2>&1 || skip "no $program; build it with cargo build --release"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 hwtests/digest.py "$program" "$model" "$work" "${ROUNDS:-5}" "${SECONDS_OF_DECODE:-30}"
