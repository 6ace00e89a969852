#!/usr/bin/env bash
# Opens the page at / of a running `mixfleet serve` in a browser: light, dark and narrow, with a chat, with the server
# killed and back, and with an engine behind a gateway killed and back. Writes pictures; `hwtests/page.sh docs/images` remakes
# those of the documentation. Exit status: 0 passed, 1 failed, 2 usage, 3 could not run (says SKIPPED and why).
#
#   hwtests/page.sh [DIRECTORY for pictures; default target/page]
#
# MIXFLEET names the binary (default target/release/mixfleet), CHROMIUM the browser (Debian: chromium).
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "SKIPPED: page: $1" >&2; exit 3; }
case ${1:-} in
-*) sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "$0"; [ "$1" = --help ] && exit 0; exit 2 ;;
esac
pictures=${1:-target/page}
program=${MIXFLEET:-target/release/mixfleet}
"$program" serve --help >/dev/null 2>&1 || skip "no $program; build it with cargo build --release"
. hwtests/page/browser.sh
mkdir -p "$pictures"
# what tests of engines share is of use here too
PYTHONPATH="$packages:hwtests/engines" exec python3 -B hwtests/page/look.py "$program" "$browser" "$pictures"
