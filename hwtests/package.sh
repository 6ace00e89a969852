#!/usr/bin/env bash
# Builds the release packages into target/package, and tests each in a bare root. Exit status: 0 done, 1 a package is
# faulty, 2 usage, 3 could not run (says SKIPPED and why).
#
#   hwtests/package.sh binary     the stripped binary of the packaged features (fleet, otlp, epp); prints its size by crate
#                                 if it is larger than 30 MB
#   hwtests/package.sh deb        that, manual pages, completions and systemd units as a Debian package, by cargo-deb
#   hwtests/package.sh tarball    the same files as a .tar.gz
#   hwtests/package.sh static     a binary that needs no library of the system and drives processors alone, as a .tar.gz (musl;
#                                 wants the Debian package musl-tools and the target x86_64-unknown-linux-musl of rustup)
#   hwtests/package.sh sbom       the dependencies of the binary as a CycloneDX file, by cargo-cyclonedx
#   hwtests/package.sh sums       SHA256SUMS of what lies there, and its signature by minisign
#   hwtests/package.sh all        all of these
#
# MIXFLEET_COMMIT names the commit that `--version` says; MIXFLEET a binary of the profile `dist` to use in place of building one;
# MIXFLEET_SIGNING_KEY the secret key of minisign (without it: a key made for this run, to test the step).
set -euo pipefail
cd "$(dirname "$0")/.."

bytes_max=$((30 * 1000 * 1000))
features=epp,fleet,otlp
to=target/package
built=${CARGO_TARGET_DIR:-target}
tools=$PWD/target/tools
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
skip() { echo "SKIPPED: package: $1" >&2; exit 3; }
wrong() { echo "package: $1" >&2; exit 1; }

# tool CRATE@VERSION: installs a cargo tool once
tool() {
    [ -x "$tools/bin/${1%@*}" ] || cargo install --quiet --debug --root "$tools" "$1" || skip "$1 cannot be had here"
}

binary() {
    mkdir -p "$to"
    if [ -n "${MIXFLEET:-}" ]; then
        cp "$MIXFLEET" "$to/mixfleet"
    else
        # functions of the same code are one, by the linker that Rust brings along
        cargo rustc --locked --profile dist -p mixfleet --features "$features" --bin mixfleet -- -C link-arg=-Wl,--icf=all
        cp "$built/dist/mixfleet" "$to/mixfleet"
    fi
    local bytes
    bytes=$(stat -c %s "$to/mixfleet")
    echo "$to/mixfleet: $bytes bytes"
    "$to/mixfleet" --version | head -n 2
    [ "$bytes" -lt "$bytes_max" ] || echo "more than $bytes_max bytes: docs/results/size.md says what they are"
}

# Everything of a package but the binary, once.
files() {
    [ -x "$to/mixfleet" ] || binary
    mkdir -p "$to/man" "$to/bash" "$to/zsh" "$to/fish"
    python3 -B hwtests/notices.py "$to/THIRD-PARTY-NOTICES" || wrong "there are no notices of third parties"
    "$to/mixfleet" man "$to/man"
    "$to/mixfleet" completions bash >"$to/bash/mixfleet"
    "$to/mixfleet" completions zsh >"$to/zsh/_mixfleet"
    "$to/mixfleet" completions fish >"$to/fish/mixfleet.fish"
}

deb() {
    files
    tool cargo-deb@3.8.0
    command -v dpkg-shlibdeps >/dev/null || skip "no dpkg-shlibdeps (Debian: dpkg-dev)"
    rm -f "$to"/*.deb
    "$tools/bin/cargo-deb" --no-build --no-strip -p mixfleet --output "$to/"
    # what it holds, as it would lie on a machine
    rm -rf "$to/unpacked"
    dpkg-deb -x "$to"/*.deb "$to/unpacked"
    dpkg-deb -f "$to"/*.deb Package Version Depends Installed-Size
    "$to/unpacked/usr/bin/mixfleet" parts h100 >/dev/null
    for file in include/mixfleet.h share/man/man1/mixfleet.1.gz share/bash-completion/completions/mixfleet \
        share/doc/mixfleet/docs/reference/serving.md share/doc/mixfleet/THIRD-PARTY-NOTICES; do
        [ -s "$to/unpacked/usr/$file" ] || wrong "the package has no $file"
    done
    units "$to/unpacked"
    installed
}

# units ROOT: what systemd says of the units that lie in ROOT, and whether they start what is there
units() {
    command -v systemd-analyze >/dev/null || { echo "SKIPPED: units: no systemd-analyze (Debian: systemd)"; return 0; }
    local name unit
    for name in serve worker; do
        unit=$(find "$1" -name "mixfleet-$name.service")
        [ -s "$unit" ] || wrong "there is no unit for $name"
        sed "s#/usr/bin/mixfleet#$PWD/$to/mixfleet#" "$unit" >"$to/mixfleet-$name.service"
        systemd-analyze verify --man=no "$to/mixfleet-$name.service" || wrong "systemd refuses the unit of $name"
        # the exposure, in tenths: 0 closed, 100 open
        systemd-analyze security --offline=true --threshold=25 "$to/mixfleet-$name.service" | tail -n 1 ||
            wrong "the unit of $name is not closed enough"
        "$to/mixfleet" "$name" --help >/dev/null || wrong "the binary has no $name"
    done
}

# bare ROOT: puts what the binary in ROOT links to there, and runs it with nothing else
bare() {
    ldd "$1/usr/bin/mixfleet" | grep -o '/[^ ]*' | xargs -I{} cp -L --parents {} "$1"
    chroot "$1" /usr/bin/mixfleet parts h100 | grep -q H100 || wrong "the installed binary does not run"
    chroot "$1" /usr/bin/mixfleet generate --prompt hello --max-tokens 4 >/dev/null || wrong "the installed binary does not compute"
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
    bare "$root"
    "${dpkg[@]}" -r mixfleet >"$to/dpkg.log" 2>&1 || wrong "dpkg does not remove it"
    [ ! -e "$root/usr/bin/mixfleet" ] || wrong "a removed package leaves its binary"
    rm -rf "$root" "$to/dpkg.log"
    echo "installed, run and removed in a bare root"
}

# archive BINARY NAME: BINARY and the other files of a package as NAME.tar.gz, equal bytes for equal files
archive() {
    local root=$to/$2
    rm -rf "$root" "$to/$2.tar.gz"
    mkdir -p "$root"/{bin,include,lib/systemd/system,share/{man/man1,bash-completion/completions,zsh/vendor-completions,fish/vendor_completions.d}}
    cp "$1" "$root/bin/mixfleet"
    cp backends/plugin/include/mixfleet.h "$root/include/"
    cp docs/deploy/systemd/*.service "$root/lib/systemd/system/"
    cp "$to"/man/*.1 "$root/share/man/man1/"
    cp "$to/bash/mixfleet" "$root/share/bash-completion/completions/"
    cp "$to/zsh/_mixfleet" "$root/share/zsh/vendor-completions/"
    cp "$to/fish/mixfleet.fish" "$root/share/fish/vendor_completions.d/"
    cp README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT "$to/THIRD-PARTY-NOTICES" "$root/"
    tar -C "$to" --sort=name --owner=0 --group=0 --numeric-owner --mtime=@"$(git log -1 --format=%ct 2>/dev/null || echo 0)" \
        -cf - "$2" | gzip -n -9 >"$to/$2.tar.gz"
    rm -rf "$root"
    echo "$to/$2.tar.gz: $(stat -c %s "$to/$2.tar.gz") bytes"
}

tarball() {
    files
    local name=mixfleet-$version-x86_64-linux
    archive "$to/mixfleet" "$name"
    [ "$(id -u)" = 0 ] || { echo "SKIPPED: to run it in a bare root takes root"; return 0; }
    rm -rf "$to/root"
    mkdir -p "$to/root/usr"
    tar -C "$to/root/usr" --strip-components=1 -xf "$to/$name.tar.gz"
    units "$to/root"
    bare "$PWD/$to/root"
    rm -rf "$to/root"
    echo "unpacked and run in a bare root"
}

static() {
    local target=x86_64-unknown-linux-musl
    files
    if [ -n "${MIXFLEET_STATIC:-}" ]; then
        cp "$MIXFLEET_STATIC" "$to/mixfleet-static"
    else
        rustc --target "$target" --print target-libdir >/dev/null 2>&1 &&
            [ -d "$(rustc --target "$target" --print target-libdir)" ] || skip "no $target; run: rustup target add $target"
        command -v musl-gcc >/dev/null || skip "no musl-gcc (Debian: musl-tools)"
        cargo build --locked --profile dist --target "$target" -p mixfleet --features "$features"
        cp "$built/$target/dist/mixfleet" "$to/mixfleet-static"
    fi
    echo "$to/mixfleet-static: $(stat -c %s "$to/mixfleet-static") bytes"
    ldd "$to/mixfleet-static" 2>&1 | grep -q 'statically linked\|not a dynamic' || wrong "it is not static"
    "$to/mixfleet-static" devices | grep -q 'this build is static' || wrong "'devices' does not say that it is static"
    "$to/mixfleet-static" generate --prompt hello --max-tokens 8 >/dev/null || wrong "it does not compute"
    archive "$to/mixfleet-static" "mixfleet-$version-x86_64-linux-static"
}

sbom() {
    mkdir -p "$to"
    tool cargo-cyclonedx@0.5.9
    (cd runtime/cli && "$tools/bin/cargo-cyclonedx" cyclonedx --quiet --format json --spec-version 1.5 --features "$features" \
        --target x86_64-unknown-linux-gnu --describe binaries --override-filename sbom-of)
    mv runtime/cli/sbom-of*.json "$to/mixfleet-$version.cdx.json"
    find . -name 'sbom-of*.json' -not -path './target/*' -delete
    python3 - "$to/mixfleet-$version.cdx.json" <<'PYTHON' || wrong "the file of dependencies is not whole"
import json, re, sys
document = json.load(open(sys.argv[1]))
listed = {(c["name"], c["version"]) for c in document["components"]}
lock = set(re.findall(r'name = "(.*)"\nversion = "(.*)"', open("Cargo.lock").read()))
print(f"{sys.argv[1]}: {document['bomFormat']} {document['specVersion']}, {len(listed)} components")
foreign = sorted(c for c in listed if c not in lock)
if foreign: sys.exit(f"not in Cargo.lock: {foreign}")
for name in ("tokio", "serde", "tonic"):
    if not any(name == n for n, _ in listed): sys.exit(f"{name} is missing")
PYTHON
}

sums() {
    command -v minisign >/dev/null || skip "no minisign (Debian: minisign)"
    (cd "$to" && rm -f SHA256SUMS SHA256SUMS.minisig && sha256sum -- *.deb *.tar.gz *.cdx.json >SHA256SUMS) || wrong "a package is missing"
    local key=${MIXFLEET_SIGNING_KEY:-} public=${MIXFLEET_SIGNING_KEY:+${MIXFLEET_SIGNING_KEY%.*}.pub}
    if [ -z "$key" ]; then
        key=$(mktemp -d)/once.key public=$to/once.pub
        minisign -G -W -f -p "$public" -s "$key" >/dev/null
        echo "signed with a key made for this run: $public"
    fi
    minisign -S -s "$key" -m "$to/SHA256SUMS" -t "mixfleet $version" >/dev/null
    minisign -V -q -p "$public" -m "$to/SHA256SUMS" || wrong "the signature does not hold"
    (cd "$to" && sha256sum --check --quiet SHA256SUMS)
    cat "$to/SHA256SUMS"
}

# What cannot run here is named; what can runs.
all() {
    local what code=0 skipped=""
    binary
    for what in deb tarball static sbom sums; do
        ("$what") || { code=$?; [ "$code" = 3 ] && skipped="$skipped $what" || exit "$code"; }
    done
    echo "package: done${skipped:+; SKIPPED:$skipped}"
}

case ${1:-} in
binary | deb | tarball | static | sbom | sums | all) [ $# = 1 ] || { sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "$0"; exit 2; }; "$1" ;;
*) sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "$0"; [ "${1:-}" = --help ] && exit 0; exit 2 ;;
esac
