#!/usr/bin/env bash
# Builds the release packages into target/package, and tests them. Exit status: 0 done, 1 a package is faulty,
# 2 usage, 3 could not run (says SKIPPED and why).
#
#   hwtests/package.sh binary     the stripped binary of the default features, which must be smaller than 30 MB
#   hwtests/package.sh deb        that, manual pages and completions as a Debian package, by cargo-deb
#   hwtests/package.sh static     a binary that needs no library of the system and drives processors alone (musl; wants the Debian
#                                 package musl-tools and the target x86_64-unknown-linux-musl of rustup)
#
# MIXFLEET_COMMIT names the commit that `--version` says; MIXFLEET a binary of the profile `dist` to use in place of building one.
set -euo pipefail
cd "$(dirname "$0")/.."

bytes_max=$((30 * 1000 * 1000))
to=target/package
built=${CARGO_TARGET_DIR:-target}
skip() { echo "SKIPPED: package: $1" >&2; exit 3; }
wrong() { echo "package: $1" >&2; exit 1; }

binary() {
    mkdir -p "$to"
    if [ -n "${MIXFLEET:-}" ]; then
        cp "$MIXFLEET" "$to/mixfleet"
    else
        # functions of the same code are one, by the linker that Rust brings along
        cargo rustc --locked --profile dist -p mixfleet --bin mixfleet -- -C link-arg=-Wl,--icf=all
        cp "$built/dist/mixfleet" "$to/mixfleet"
    fi
    local bytes
    bytes=$(stat -c %s "$to/mixfleet")
    echo "$to/mixfleet: $bytes bytes"
    "$to/mixfleet" --version | head -n 1
    [ "$bytes" -lt "$bytes_max" ] || wrong "$bytes bytes are more than $bytes_max"
}

deb() {
    binary
    local tool=target/tools/bin/cargo-deb
    if [ ! -x "$tool" ]; then
        cargo install --quiet --debug --root target/tools cargo-deb@3.8.0 || skip "cargo-deb cannot be had here"
    fi
    command -v dpkg-shlibdeps >/dev/null || skip "no dpkg-shlibdeps (Debian: dpkg-dev)"
    mkdir -p "$to/man" "$to/bash" "$to/zsh" "$to/fish"
    python3 -B hwtests/notices.py "$to/THIRD-PARTY-NOTICES" || wrong "there are no notices of third parties"
    "$to/mixfleet" man "$to/man"
    "$to/mixfleet" completions bash >"$to/bash/mixfleet"
    "$to/mixfleet" completions zsh >"$to/zsh/_mixfleet"
    "$to/mixfleet" completions fish >"$to/fish/mixfleet.fish"
    rm -f "$to"/*.deb
    "$tool" --no-build --no-strip -p mixfleet --output "$to/"
    # what it holds, as it would lie on a machine
    rm -rf "$to/unpacked"
    dpkg-deb -x "$to"/*.deb "$to/unpacked"
    dpkg-deb -f "$to"/*.deb Package Version Depends Installed-Size
    "$to/unpacked/usr/bin/mixfleet" parts h100 >/dev/null
    for file in include/mixfleet.h share/man/man1/mixfleet.1.gz share/bash-completion/completions/mixfleet \
        share/doc/mixfleet/docs/reference/serving.md share/doc/mixfleet/THIRD-PARTY-NOTICES; do
        [ -s "$to/unpacked/usr/$file" ] || wrong "the package has no $file"
    done
    installed
}

# Installs the package into a bare root with nothing but the libraries that it depends on, runs it there, and
# removes it.
installed() {
    [ "$(id -u)" = 0 ] || { echo "SKIPPED: to install it takes root"; return 0; }
    local root=$PWD/$to/root
    rm -rf "$root"
    mkdir -p "$root"/var/lib/dpkg/{updates,info}
    touch "$root/var/lib/dpkg/status"
    local dpkg=(dpkg --root="$root" --force-depends --log=/dev/null)
    "${dpkg[@]}" -i "$to"/*.deb >"$to/dpkg.log" 2>&1 || { cat "$to/dpkg.log" >&2; wrong "dpkg does not install it"; }
    "${dpkg[@]}" -s mixfleet | grep -q '^Status: install ok installed' || wrong "dpkg does not know of it"
    ldd "$root/usr/bin/mixfleet" | grep -o '/[^ ]*' | xargs -I{} cp -L --parents {} "$root"
    chroot "$root" /usr/bin/mixfleet parts h100 | grep -q H100 || wrong "the installed binary does not run"
    "${dpkg[@]}" -r mixfleet >"$to/dpkg.log" 2>&1 || wrong "dpkg does not remove it"
    [ ! -e "$root/usr/bin/mixfleet" ] || wrong "a removed package leaves its binary"
    rm -rf "$root" "$to/dpkg.log"
    echo "installed, run and removed in a bare root"
}

static() {
    local target=x86_64-unknown-linux-musl
    mkdir -p "$to"
    if [ -n "${MIXFLEET:-}" ]; then
        cp "$MIXFLEET" "$to/mixfleet-static"
    else
        rustc --target "$target" --print target-libdir >/dev/null 2>&1 &&
            [ -d "$(rustc --target "$target" --print target-libdir)" ] || skip "no $target; run: rustup target add $target"
        command -v musl-gcc >/dev/null || skip "no musl-gcc (Debian: musl-tools)"
        cargo build --locked --profile dist --target "$target" -p mixfleet
        cp "$built/$target/dist/mixfleet" "$to/mixfleet-static"
    fi
    echo "$to/mixfleet-static: $(stat -c %s "$to/mixfleet-static") bytes"
    ldd "$to/mixfleet-static" 2>&1 | grep -q 'statically linked\|not a dynamic' || wrong "it is not static"
    "$to/mixfleet-static" devices | grep -q 'this build is static' || wrong "'devices' does not say that it is static"
    "$to/mixfleet-static" generate --prompt hello --max-tokens 8 >/dev/null || wrong "it does not compute"
}

case ${1:-} in
binary | deb | static) [ $# = 1 ] || { sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit 2; }; "$1" ;;
*) sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "$0"; [ "${1:-}" = --help ] && exit 0; exit 2 ;;
esac
