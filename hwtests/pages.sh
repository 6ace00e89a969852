#!/usr/bin/env bash
# Makes each page that `mixfleet` writes and opens it in a browser: light, dark, narrow and as print. Checks that nothing is
# wider than its window, that no chart is blank, that charts, tables and links have names, that text stands out from its ground
# (4.5:1), and that axe-core finds no violation of its rules. Writes pictures: report-*.png and plan-{light,narrow}.png are
# those of docs/images. Exit status: 0 passed, 1 failed, 2 usage, 3 could not run (says SKIPPED and why).
#
#   hwtests/pages.sh [DIRECTORY for pages and pictures; default target/pages]
#
# MIXFLEET names the binary (default target/release/mixfleet), CHROMIUM the browser (Debian: chromium).
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "SKIPPED: pages: $1" >&2; exit 3; }
case ${1:-} in
-*) sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "$0"; [ "$1" = --help ] && exit 0; exit 2 ;;
esac
pages=${1:-target/pages}
program=${MIXFLEET:-target/release/mixfleet}
"$program" validate --help >/dev/null 2>&1 || skip "no $program; build it with cargo build --release"
. hwtests/page/browser.sh

rm -rf "$pages"
mkdir -p "$pages"
PYTHONPATH="$packages:hwtests/engines" exec python3 -B hwtests/page/pages.py "$program" "$browser" "$pages"
