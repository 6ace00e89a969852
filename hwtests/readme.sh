#!/usr/bin/env bash
# Runs every command of README.md, or of the given pages, as it stands: each block of ```sh in the order of
# the page. The commands run in an empty directory, with their own ports and caches. The lines of a ```text
# block after it must occur in the output, in this order; numbers may differ, and `...` stands for omitted
# lines. Also compares README.md's picture and numbers with their result page. Exit status: 0 passed, 1
# failed, 2 usage, 3 could not run (says SKIPPED and why).
#
#   hwtests/readme.sh [--install] [PAGE...; default README.md]
#
# An HTML comment before a block says how to run it:
#   <!-- run: skip, REASON -->        do not run it: it needs hardware, a network or another service
#   <!-- run: server, until TEXT -->  run it beside the following blocks, once it has printed TEXT
#   <!-- run: fetch, FOLDER -->       it downloads FOLDER: link target/real/FOLDER in its place (hwtests/real.sh
#                                     downloads it), or skip the later blocks that name FOLDER
#   <!-- run: install -->             run it in the root of the repository, and only with --install
#
# MIXFLEET names the binary (default target/release/mixfleet); --install uses the installed one.
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "SKIPPED: readme: $1" >&2; exit 3; }
install=""
[ "${1:-}" != --install ] || { install=--install; shift; }
case ${1:-} in
-*) sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "$0"; [ "$1" = --help ] && exit 0; exit 2 ;;
esac
program=${MIXFLEET:-target/release/mixfleet}
[ -n "$install" ] || "$program" plan --help >/dev/null 2>&1 || skip "no $program; build it with cargo build --release"
for tool in python3 curl; do command -v "$tool" >/dev/null || skip "no $tool (Debian: $tool)"; done
python3 -B hwtests/readme.py --self-test
[ $# -gt 0 ] || {
    set -- README.md
    hwtests/picture.py --check docs/results/plan.md docs/images/mixes.svg README.md
}
# a separate network, so that the port of an example is free; without one, the port must be
alone=(unshare --net --map-root-user)
[ -z "$install" ] && "${alone[@]}" true 2>/dev/null || alone=()
exec "${alone[@]}" python3 -B hwtests/readme.py $install "$program" "$@"
