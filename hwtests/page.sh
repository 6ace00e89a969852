#!/usr/bin/env bash
# Opens the page at / of a running `mixfleet serve` in a browser: light, dark and narrow, with a chat, with the server
# killed and back. Writes pictures. Exit status: 0 passed, 1 failed, 2 usage, 3 could not run (says SKIPPED and why).
#
#   hwtests/page.sh [DIRECTORY for pictures; default target/page]
#
# MIXFLEET names the binary (default target/release/mixfleet), CHROMIUM the browser (Debian: chromium).
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "SKIPPED: page: $1" >&2; exit 3; }
case ${1:-} in
-*) sed -n '2,8s/^# \{0,1\}//p' "$0"; [ "$1" = --help ] && exit 0; exit 2 ;;
esac
pictures=${1:-target/page}
program=${MIXFLEET:-target/release/mixfleet}
browser=${CHROMIUM:-$(command -v chromium || true)}
"$program" serve --help >/dev/null 2>&1 || skip "no $program; build it with cargo build --release"
[ -n "$browser" ] || skip "no Chromium; install it (Debian: chromium) or name one in CHROMIUM"
python3 -m pip --version >/dev/null 2>&1 || skip "no pip (Debian: python3-pip)"

packages=target/page-packages
if [ ! -e "$packages/complete" ]; then
    rm -rf "$packages"
    mkdir -p "$packages"
    if ! python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target "$packages" \
        playwright==1.65.2 2>"$packages/log"; then
        cat "$packages/log" >&2
        grep -qE 'Connection|Timeout|Temporary failure|Network is unreachable|ProxyError|No matching distribution' "$packages/log" || exit 1
        skip "playwright cannot be had here"
    fi
    touch "$packages/complete"
fi
mkdir -p "$pictures"
# what tests of engines share is of use here too
PYTHONPATH="$packages:hwtests/engines" exec python3 -B hwtests/page/look.py "$program" "$browser" "$pictures"
