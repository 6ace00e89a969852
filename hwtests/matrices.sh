#!/usr/bin/env bash
# Products by matrices (wgpu): runs the tests of `wgpu` that need an adapter which multiplies matrices, on a newer Mesa than the
# machine has (lavapipe, version 26 or later). It and all that it loads, its libc included, come from Debian's archive, 70 MB, and
# are unpacked into target/mesa: nothing is installed. Exit status: 0 passed, 1 failed, 3 could not run (says SKIPPED and why).
#   hwtests/matrices.sh [TEST FILTER; default matrices::]
# SUITE names the releases that Mesa is taken from, the last one first (default "trixie trixie-backports"), TESTS the built tests
# of `wgpu` (default: they are built).
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "SKIPPED: matrices: $1" >&2; exit 3; }
for tool in apt-get dpkg-deb; do command -v "$tool" >/dev/null || skip "no $tool: Mesa is taken from Debian's archive"; done
[ "$(dpkg --print-architecture)" = amd64 ] || skip "Mesa is taken for amd64"
read -ra suites <<<"${SUITE:-trixie trixie-backports}"
at=$PWD/target/mesa
root=$at/root
if [ ! -e "$at/complete" ] || [ "$(cat "$at/complete")" != "${suites[*]}" ]; then
    # the archive that this machine's own packages come from
    archive=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 2>/dev/null | head -n 1)
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -n "$archive" ] && [ -f "$keys" ] || skip "this machine has no packages of Debian (apt-get update?)"
    rm -rf "$at"
    mkdir -p "$at"/apt/{lists/partial,cache/archives/partial} "$root"
    : >"$at/apt/status"
    printf "deb [signed-by=$keys] $archive %s main\n" "${suites[@]}" >"$at/apt/sources.list"
    cat >"$at/apt/conf" <<END
Dir::State "$at/apt";
Dir::State::status "$at/apt/status";
Dir::State::lists "$at/apt/lists";
Dir::Cache "$at/apt/cache";
Dir::Etc::sourcelist "$at/apt/sources.list";
Dir::Etc::sourceparts "-";
Dir::Etc::preferencesparts "-";
APT::Install-Recommends "false";
APT::Sandbox::User "";
END
    export APT_CONFIG=$at/apt/conf
    if ! { apt-get -qq update && apt-get -qq --yes --download-only --target-release "${suites[-1]}" install \
        mesa-vulkan-drivers libvulkan1; } >"$at/log" 2>&1; then
        tail -n 5 "$at/log" >&2
        skip "the archive does not give mesa-vulkan-drivers of ${suites[*]}"
    fi
    unset APT_CONFIG
    for package in "$at"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
    rm -r "$at/apt"
    libraries=$root/usr/lib/x86_64-linux-gnu
    sed "s|\"library_path\": \".*\"|\"library_path\": \"$libraries/libvulkan_lvp.so\"|" \
        "$root"/usr/share/vulkan/icd.d/lvp_icd*.json >"$at/lvp.json"
    echo "${suites[*]}" >"$at/complete"
fi
libraries=$root/usr/lib/x86_64-linux-gnu
if [ -z "${TESTS:-}" ]; then
    TESTS=$(cargo test -p mixfleet-wgpu --test all --no-run --message-format=json |
        sed -n 's/.*"name":"all".*"executable":"\([^"]*\)".*/\1/p')
fi
[ -x "$TESTS" ] || { echo "matrices: the tests of wgpu were not built" >&2; exit 1; }
TESTS=$(realpath "$TESTS")
# with it, an adapter without matrices fails the tests
export MIXFLEET_MATRICES=1 VK_DRIVER_FILES=$at/lvp.json VK_ICD_FILENAMES=$at/lvp.json
cd backends/wgpu
"$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$TESTS" --nocapture --test-threads=1 "${1:-matrices::}"
