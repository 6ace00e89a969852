#!/usr/bin/env bash
# RDMA without RDMA hardware: boots a kernel with soft-RoCE (rxe) in QEMU and runs backends/wire's checks there, in one
# guest and between two, beside perftest's ib_write_bw; then serves a model from two guests, one of which computes
# prompts and the other answers, with KV by RDMA, and from an instance in one that has a device of the other. Changes
# nothing on this system: packages are unpacked below the cache.
# Exit status: 0 passed, 1 a check failed, 3 could not run (says SKIPPED and why).
#
#   hwtests/rdma.sh             all guests (Debian on x86-64; needs apt)
#   hwtests/rdma.sh --wire      without serving
#   hwtests/rdma.sh --serve     only serving
#   hwtests/rdma.sh --here      the checks of --wire on this machine's own RDMA devices
#
# MIXFLEET_RDMA_CACHE names the cache (default target/rdma, 700 MB), MIXFLEET_RDMA_FEATURES what cargo builds with,
# MIXFLEET_RDMA_KV_DTYPE the KV of the model that is served (default f32), MIXFLEET_RDMA_MODEL that model (a directory of
# ../shared/fixtures; default llama-gqa-f32).
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "SKIPPED: RDMA: $1" >&2; exit 3; }
here="" wire=1 serve=1
case ${1:-} in
"") ;;
--wire) serve="" ;;
--serve) wire="" ;;
--here) here=1 serve="" ;;
*) sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "$0"; [ "$1" = --help ] && exit 0; exit 2 ;;
esac

# by default with the features of test-all.sh, so that what that has built is not built anew
read -ra features <<<"--locked ${MIXFLEET_RDMA_FEATURES:---workspace --features mixfleet/full}"
built=$(realpath "${CARGO_TARGET_DIR:-target}")/debug
# one call: of other targets cargo takes other features of what they share, and builds that twice
cargo build "${features[@]}" ${serve:+--bin mixfleet} --example rdma_check
program=$built/examples/rdma_check
conformance=$program
if [ -n "$wire" ]; then
    conformance=$(cargo test "${features[@]}" --no-run --test verbs 2>&1 | tee /dev/stderr |
        sed -n 's/^ *Executable .*(\(.*\))$/\1/p')
    conformance=$(realpath "$conformance")
fi

if [ -n "$here" ]; then
    "$program" self
    exec "$conformance" --test-threads=2
fi

cache=${MIXFLEET_RDMA_CACHE:-target/rdma}
mkdir -p "$cache"
cache=$(realpath "$cache")
root="$cache/sysroot"
libraries=/usr/lib/x86_64-linux-gnu

[ "$(uname -m)" = x86_64 ] || skip "the guests are x86-64, this machine is $(uname -m)"
if [ ! -e "$cache/complete" ]; then
    command -v apt-get >/dev/null || skip "no apt-get to fetch a kernel, QEMU and perftest with; see --here"
    kernel=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image/ {print $2; exit}')
    [ -n "$kernel" ] || skip "apt knows no linux-image-amd64 (run: apt-get update; only Debian's kernel is known to have rxe)"
    # Installed packages are used from the system; qemu-utils stays, it may conflict.
    wanted=$(apt-get -s --no-install-recommends install qemu-system-x86 qemu-utils- kmod cpio busybox-static perftest \
        iproute2 ibverbs-providers 2>/dev/null | awk '/^Inst/ {print $2}')
    rm -rf "$cache/debs" "$root"
    mkdir -p "$cache/debs" "$root"
    # shellcheck disable=SC2086 # a list of words
    (cd "$cache/debs" && apt-get -qq download "$kernel" $wanted) 2>/dev/null || skip "apt cannot download $kernel and QEMU"
    for package in "$cache"/debs/*.deb; do dpkg -x "$package" "$root"; done
    rm -rf "$cache/debs"
    touch "$cache/complete"
fi

# The unpacked package's file, or the installed one's.
find_file() {
    local path
    for path in "$@"; do
        [ -e "$root$path" ] && echo "$root$path" && return
        [ -e "$path" ] && echo "$path" && return
    done
    skip "none of $* is there"
}
run() { LD_LIBRARY_PATH="$root$libraries:$root/lib/x86_64-linux-gnu" "$@"; }

kernel=$(basename "$root"/lib/modules/*)
kmod=$(find_file /bin/kmod /usr/bin/kmod)
ln -sf "$kmod" "$cache/modprobe"
ln -sf "$kmod" "$cache/depmod"
[ -f "$root/lib/modules/$kernel/modules.dep" ] || run "$cache/depmod" -b "$root" "$kernel"

# libraries_of ROOT FILE..: puts what the files are linked with below ROOT.
libraries_of() {
    local file library place root_to=$1
    shift
    for file in "$@"; do run ldd "$file"; done |
        awk '/=> \// {print $3} /^[[:space:]]*\/lib/ {print $1}' | sort -u | while read -r library; do
        # cached packages go where the guest's loader looks
        place="$root_to${library#"$root"}"
        mkdir -p "$(dirname "$place")"
        cp -L "$library" "$place"
    done
}

guest="$cache/guest"
rm -rf "$guest"
mkdir -p "$guest"/{bin,proc,sys,dev,run,etc/libibverbs.d,modules}
cp -L "$(find_file /bin/busybox /usr/bin/busybox)" "$guest/bin/busybox"
ln -s busybox "$guest/bin/sh"
for module in virtio_pci virtio_net dummy rdma_rxe ib_uverbs crc32_generic; do
    run "$cache/modprobe" -d "$root" -S "$kernel" --show-depends "$module"
done | awk '/^insmod/ && !seen[$2]++ {print $2}' | while read -r file; do
    cp "$file" "$guest/modules/"
    basename "$file" >>"$guest/modules/order"
done
provider=$(cd / && ls $libraries/libibverbs/librxe-rdmav*.so 2>/dev/null || (cd "$root" && ls ."$libraries"/libibverbs/librxe-rdmav*.so))
provider=$(find_file "${provider#.}")
cp "$conformance" "$cache/conformance"
binaries=("$program" "$cache/conformance" "$(find_file /usr/bin/ib_write_bw)" "$(find_file /usr/bin/rdma /sbin/rdma)" "$(find_file /sbin/ip /usr/sbin/ip /bin/ip)")
cp -L "${binaries[@]}" "$guest/bin/"
mkdir -p "$guest$libraries/libibverbs"
cp -L "$provider" "$guest$libraries/libibverbs/"
cp -L "$(find_file /etc/libibverbs.d/rxe.driver)" "$guest/etc/libibverbs.d/"
libraries_of "$guest" "${binaries[@]}" "$provider"
cp hwtests/rdma/guest.sh "$guest/job.sh"
cp hwtests/rdma/init.sh "$guest/init"
chmod +x "$guest/init"
cpio=$(find_file /bin/cpio /usr/bin/cpio)
pack() { (cd "$1" && find . | run "$cpio" -o -H newc --quiet | gzip -1); }
pack "$guest" >"$cache/initrd.gz"

qemu=$(find_file /usr/bin/qemu-system-x86_64)
data=()
case $qemu in "$root"*) data=(-L "$root/usr/share/qemu" -L "$root/usr/share/seabios") ;; esac
# /dev/kvm alone says nothing: without these flags it is a nested one that hangs stock kernels.
accelerate=(-accel "tcg,thread=multi" -cpu max)
if [ -w /dev/kvm ] && grep -qEw 'vmx|svm' /proc/cpuinfo; then accelerate=(-accel kvm -cpu host); fi

initrd="$cache/initrd.gz" memory_mib=1024 limit_s=150

# boot NAME PROCESSORS ROLE ADDRESS [QEMU ARGUMENTS]: runs a guest; its log is the cache's NAME.log.
boot() {
    local name=$1 processors=$2 role=$3 address=$4
    shift 4
    run timeout "$limit_s" "$qemu" -M q35 "${accelerate[@]}" -m "$memory_mib" -smp "$processors" -display none -vga none -serial stdio \
        -monitor none -no-reboot "${data[@]}" -kernel "$(ls "$root"/boot/vmlinuz-*)" -initrd "$initrd" \
        -append "console=ttyS0 panic=-1 quiet guest.role=$role guest.address=$address" -pidfile "$cache/$name.pid" "$@" \
        </dev/null 2>&1 | tr -cd '\11\12\40-\176' >"$cache/$name.log" || true
}

# report NAME: prints what the guest's job said, and succeeds if that did.
report() {
    printf '\n-- %s --\n' "$1"
    grep -E '^(ok|FAILED|rdma_check|bench|rxe0|status|conformance|test |GUEST)|panicked|assertion' "$cache/$1.log" || true
    if ! grep -q '^GUEST-STATUS 0' "$cache/$1.log"; then
        echo "RDMA: $1 failed; the end of $cache/$1.log:" >&2
        tail -n 15 "$cache/$1.log" >&2
        return 1
    fi
}

failed=0
socket="$cache/wire.socket"
nic() { echo "virtio-net-pci,netdev=wire,mac=52:54:00:00:01:0$1,romfile=,host_mtu=9000"; }

# those whose shell the others use, or their etcd, have the first address
address_of() { case $1 in server | prefill) echo 10.9.0.1 ;; *) echo 10.9.0.2 ;; esac; }

# pair FIRST SECOND PROCESSORS: two guests of these names and roles on one wire; the second reports, and switches the
# first off.
pair() {
    rm -f "$socket"
    boot "$1" "$3" "$1" "$(address_of "$1")" -netdev "stream,id=wire,server=on,addr.type=unix,addr.path=$socket" -device "$(nic 1)" &
    until [ -S "$socket" ] || ! kill -0 $!; do :; done 2>/dev/null
    boot "$2" "$3" "$2" "$(address_of "$2")" -netdev "stream,id=wire,server=off,addr.type=unix,addr.path=$socket" -device "$(nic 2)"
    if ! report "$2"; then
        failed=1
        tail -n 15 "$cache/$1.log" >&2
        [ ! -f "$cache/$1.pid" ] || kill "$(cat "$cache/$1.pid")"
    fi
    wait
}

# What a fleet of two guests needs beside the rest: the binary, etcd, a model, certificates, and what one process gives
# for the same request.
pack_fleet() {
    local extra="$cache/extra" fixture=../shared/fixtures/${MIXFLEET_RDMA_MODEL:-llama-gqa-f32} prompt=0,498,357,350,372,486,88
    local kv=${MIXFLEET_RDMA_KV_DTYPE:-f32} here=() answer ids
    local model=(--activations f32 --kv-dtype "$kv" --kv-memory 0.02)
    rm -rf "$extra"
    mkdir -p "$extra"/{bin,fleet,model}
    if [ -d "$fixture" ]; then
        cp "$fixture"/* "$extra/model/"
        here=(--model "$fixture")
        echo "--model /model ${model[*]}" >"$extra/fleet/model"
    else
        echo "SKIPPED: RDMA: no fixture at $fixture: the built-in model is served, and its tokens are not known before"
        echo "${model[*]}" >"$extra/fleet/model"
    fi
    answer=$("$built/mixfleet" generate --json "${here[@]}" "${model[@]}" --prefill cpu --decode cpu --temperature 0 \
        --ignore-eos --max-tokens 48 --prompt-ids "$prompt")
    # KV of fewer bits gives different tokens: the guests' must equal those of one process here
    if [ -d "$fixture" ] && [ "$kv" = f32 ]; then
        ids=$(sed -n 's/.*"ids":\[\([0-9,]*\)\].*/\1/p' <<<"$answer")
        if ! tr -d ' \n' <"$fixture/golden.json" | grep -qF "\"prompt_ids\":[$prompt],\"greedy_ids\":[$ids]"; then
            echo "FAILED  serve: one process gives other tokens than the golden ones: $answer"
            failed=1
        fi
    fi
    json_text <<<"$answer" >"$extra/fleet/text"
    echo "$prompt" >"$extra/fleet/prompt"
    echo "{\"model\":\"served\",\"prompt\":[$prompt],\"max_tokens\":48,\"temperature\":0,\"ignore_eos\":true}" >"$extra/fleet/request"
    "$program" certificates "$extra/fleet" mixfleet 10.9.0.1
    strip -o "$extra/bin/mixfleet" "$built/mixfleet"
    cp "$(command -v etcd)" "$extra/bin/"
    libraries_of "$extra" "$built/mixfleet" "$(command -v etcd)"
    # archives that follow each other are unpacked over each other
    pack "$extra" | cat "$cache/initrd.gz" - >"$cache/fleet.gz"
}

# The text of an answer, as JSON writes it.
json_text() { sed -n 's/.*"text":\("\([^"\\]\|\\.\)*"\).*/\1/p'; }

if [ -n "$wire" ]; then
    boot alone 2 alone 10.9.0.1 -nic none
    report alone || failed=1
    pair server client 1
fi
if [ -n "$serve" ] && ! command -v etcd >/dev/null; then
    echo "SKIPPED: RDMA: serving: no etcd on PATH (Debian: etcd-server)"
elif [ -n "$serve" ]; then
    pack_fleet
    initrd="$cache/fleet.gz" memory_mib=2048 limit_s=400
    pair decode prefill 2
fi
logs=()
[ -z "$wire" ] || logs+=("$cache"/{alone,client}.log)
[ -z "$serve" ] || logs+=("$cache/prefill.log")
checks=$(cat "${logs[@]}" | grep -c '^ok' || true)
echo
if [ "$failed" = 0 ]; then echo "RDMA: $checks checks passed"; else echo "RDMA: failed"; fi
exit "$failed"
