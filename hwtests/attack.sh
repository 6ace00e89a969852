#!/usr/bin/env bash
# Attacks a server as hostile clients, logs and files would. Each attack is a script in hwtests/attack/ and must be
# repelled.
#
#   hwtests/attack.sh [--full] [--list] [NAME...]
#
# Without a NAME all attacks run. --full runs them longer and with larger inputs (for the night). MIXFLEET names the
# binary (default target/release/mixfleet). Exit codes: 0 all repelled, 1 one succeeded, 2 usage, 3 could not run.
set -uo pipefail
cd "$(dirname "$0")/.."
usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '$d'; }
program=${MIXFLEET:-target/release/mixfleet}
full=() names=()
for argument in "$@"; do
    case $argument in
        --full) full=(--full) ;;
        --list) for file in hwtests/attack/[a-z]*.py; do
                    name=$(basename "$file" .py)
                    [ "$name" = common ] || printf '%-14s %s\n' "$name" "$(sed -n '1s/^"""\([^"]*\).*/\1/p' "$file")"
                done; exit 0 ;;
        --help) usage; exit 0 ;;
        -*) echo "attack: there is no option $argument" >&2; usage >&2; exit 2 ;;
        *) [ -f "hwtests/attack/$argument.py" ] || { echo "attack: there is no attack $argument; --list shows them" >&2; exit 2; }
           names+=("$argument") ;;
    esac
done
"$program" --version >/dev/null 2>&1 || { echo "SKIPPED: attack: no $program; build it with cargo build --release" >&2; exit 3; }
if [ ${#names[@]} = 0 ]; then
    for file in hwtests/attack/[a-z]*.py; do
        name=$(basename "$file" .py)
        [ "$name" = common ] || names+=("$name")
    done
fi
status=0
for name in "${names[@]}"; do
    echo "-- attack: $name"
    began=$SECONDS code=0
    python3 -B "hwtests/attack/$name.py" "$program" "${full[@]}" || code=$?
    case $code in
        0) echo "-- $name: repelled, $((SECONDS - began)) s" ;;
        3) echo "-- $name: not run, its reason is above" ;;
        *) echo "-- $name: SUCCEEDED (exit $code), $((SECONDS - began)) s"; status=1 ;;
    esac
done
exit "$status"
