#!/usr/bin/env bash
# A vendor's path with an unknown part: from a library with a C interface to the price below which the part
# wins. The part is the example in hwtests/plugin, and stands for yours. Each step is a command to copy. Exit
# status: 0 all steps passed, 1 one did not, 2 usage, 3 could not run (says SKIPPED and why).
#
#   hwtests/walkthrough.sh [DIRECTORY for what it makes; default target/walkthrough]
#
# MIXFLEET names the binary (default target/release/mixfleet).
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "SKIPPED: walk-through: $1" >&2; exit 3; }
case ${1:-} in
-*) sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "$0"; [ "$1" = --help ] && exit 0; exit 2 ;;
esac
out=${1:-target/walkthrough}
program=${MIXFLEET:-target/release/mixfleet}
"$program" validate --help >/dev/null 2>&1 || skip "no $program; build it with cargo build --release"
for tool in make cc; do command -v "$tool" >/dev/null || skip "no $tool (Debian: gcc make)"; done
rm -rf "$out"
mkdir -p "$out/driver-1" "$out/driver-2"
out=$(cd "$out" && pwd)

began=$SECONDS
step() { printf '\n== %s (at %s s) ==\n' "$1" "$((SECONDS - began))"; }
fail() { echo "FAILED: $1" >&2; exit 1; }
# must STATUS COMMAND...: runs a command, which must end so
must() {
    local want=$1 got=0
    shift
    "$@" || got=$?
    [ "$got" = "$want" ] || fail "'$*' ended with $got, must end with $want"
}
part() { "$program" --backend "$library" "$@"; }

step "1. A library that drives the part"
make -s -C hwtests/plugin OUT="$out/driver-1"
library=$out/driver-1/loops.so
part devices | grep -A 3 '^loops:0' || fail "devices does not list the part"

step "2. What it really does"
# a few small points, since these are plain loops; leave --only away for your part
points=launch.empty,memory_read.256KiB,memory_read.4MiB,gemm.bf16.m1.n256.k2048,gemm.bf16.m64.n256.k2048
must 0 part profile --device loops:0 --quick --only "$points" --out "$out/loops.json" --html "$out/profile.html"

step "3. Its claims"
must 0 part validate --init-part "$out/part.toml" --profile "$out/loops.json"
# a vendor writes its own numbers here; this machine does other work too
sed -i 's/^at_least = .*/at_least = 0.0001/' "$out/part.toml"
grep -q '^\[\[claim\]\]' "$out/part.toml" || fail "the profile gave no claim"

step "4. Validation to level 6, with a soak"
# levels 0 to 6 in a minute; leave --only and --memory away for a report to publish
some=l0,l1.gemm,l1.fill,l1.order,l2.random,l3.memory_read.4MiB,l3.gemm.bf16.m1.n256.k2048,l3.gemm.bf16.m64.n256.k2048,l4.memory,l5,l6
common=(--device loops:0 --level 6 --soak 1s --memory 1MiB --only "$some" --part "$out/part.toml")
must 0 part validate "${common[@]}" --out "$out/report-1"
(cd "$out/report-1" && sha256sum --quiet -c SHA256SUMS) || fail "the checksums do not hold"
grep -q 'What passed' "$out/report-1/report.html" || fail "the report does not say what passed"

step "5. Another driver: slower, and right"
make -s -C hwtests/plugin CFLAGS="-O0" OUT="$out/driver-2"
library=$out/driver-2/loops.so
must 0 part validate "${common[@]}" --out "$out/report-2"
must 0 "$program" validate diff "$out/report-1" "$out/report-2" --html "$out/diff-2.html"

step "6. Another one: wrong"
# the same code under another name, whose results are garbage
library=$out/driver-2/hostile.so
wrong=(--device hostile:0 --level 1 --only l1.gemm,l1.fill)
MIXFLEET_HOSTILE=garbage must 1 part validate "${wrong[@]}" --out "$out/report-3" 2>/dev/null >"$out/report-3.txt"
head -n 1 "$out/report-3.txt"
must 1 "$program" validate diff "$out/report-1" "$out/report-3" --html "$out/diff-3.html" >"$out/diff-3.txt"
grep 'passed before and fail now' "$out/diff-3.txt" || fail "the diff does not name what broke"

step "7. The price below which it wins"
# plain loops on a core are cheap only if they cost next to nothing
must 0 "$program" compare --model qwen3-0.6b "$out/loops.json" rtx-4090 l40s --usd-per-hour loops=0.00001 \
    --html "$out/compare.html" >"$out/compare.txt"
grep -A 4 '^loops$' "$out/compare.txt" || fail "the comparison does not speak of the part"
grep -A 4 '^loops$' "$out/compare.txt" | grep -q 'cheapest decode .*below \$' || fail "no price is printed"

step "done"
echo "the pages are in $out: profile.html, report-1/report.html, diff-2.html, compare.html"
