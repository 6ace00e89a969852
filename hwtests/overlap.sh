#!/usr/bin/env bash
# Measures how much of a hand-off is exposed between two hosts: a prefill worker and a decode worker in
# separate network namespaces, KV over TCP under TLS, and a link with twice the rate at which prefill produces
# KV. Root, iproute2, etcd, openssl and python3; changes nothing outside its namespaces. Exit status: 0 at
# most a tenth of the serial time plus the last layer's is exposed, 1 more is, 3 could not run (says SKIPPED
# and why).
#
#   hwtests/overlap.sh MODEL          a checkpoint directory
#
# MIXFLEET names the binary (default target/release/mixfleet, with the feature fleet), TOKENS the prompt
# (2048), CHUNK a step of it (512), FACTOR the link's rate over prefill's rate of KV (2), ROUNDS the
# repetitions (3).
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "SKIPPED: overlap: $1" >&2; exit 3; }
model=${1:-}
case $model in
"" | -*) sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "$0"; [ "$model" = --help ] && exit 0; exit 2 ;;
esac
program=${MIXFLEET:-target/release/mixfleet}
tokens=${TOKENS:-2048} chunk=${CHUNK:-512} factor=${FACTOR:-2} rounds=${ROUNDS:-3}

[ "$(id -u)" = 0 ] || skip "needs root for network namespaces"
for tool in ip tc etcd openssl python3; do
    command -v "$tool" >/dev/null || skip "no $tool (Debian: iproute2 etcd-server openssl python3)"
done
[ -f "$model/config.json" ] || skip "no checkpoint in $model; one with random weights will do (hwtests/peers/README.md)"
"$program" worker --help >/dev/null 2>&1 || skip "no $program with the feature fleet; see docs/how-to/run-a-fleet.md"

work=$(mktemp -d) left=mixfleet-$$-p right=mixfleet-$$-d
processes=()
finish() {
    for process in "${processes[@]}"; do kill "$process" 2>/dev/null || true; done
    wait 2>/dev/null || true
    ip netns del "$left" 2>/dev/null || true
    ip netns del "$right" 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT

# Two hosts and a wire.
here=10.213.77.1 there=10.213.77.2
ip netns add "$left" 2>/dev/null || skip "the kernel gives no network namespaces"
ip netns add "$right"
ip -n "$left" link add wire type veth peer name wire netns "$right" || skip "the kernel has no veth"
for host in "$left $here" "$right $there"; do
    read -r name address <<<"$host"
    ip -n "$name" addr add "$address/24" dev wire
    ip -n "$name" link set lo up
    ip -n "$name" link set wire up
done
ip netns exec "$left" tc qdisc add dev wire root tbf rate 1gbit burst 64kb latency 20ms 2>/dev/null ||
    skip "the kernel has no tbf queueing discipline"

# An authority, and one certificate that all show.
(
    cd "$work"
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=authority -keyout ca.key -out ca.pem
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=mixfleet -keyout key.pem -out member.csr
    openssl x509 -req -in member.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 1 -out member.pem \
        -extfile <(echo "subjectAltName=DNS:mixfleet,IP:$here,IP:$there")
) >"$work/openssl.log" 2>&1 || { cat "$work/openssl.log" >&2; skip "openssl made no certificates"; }

# start HOST NAME COMMAND...
start() {
    local host=$1 name=$2
    shift 2
    : >"$work/$name.log"
    ip netns exec "$host" "$@" >"$work/$name.log" 2>&1 &
    processes+=($!)
}
# says NAME TEXT: waits for it in the log of the process that was started last
says() {
    for _ in $(seq 3000); do
        grep -q "$2" "$work/$1.log" && return
        kill -0 "${processes[-1]}" 2>/dev/null || break
        sleep 0.1
    done
    cat "$work/$1.log" >&2
    skip "$1 did not say '$2'"
}
url=https://$here:2379
tls=(--cert-file "$work/member.pem" --key-file "$work/key.pem" --trusted-ca-file "$work/ca.pem" --client-cert-auth)
start "$left" etcd etcd --data-dir "$work/etcd" --listen-client-urls "$url" --advertise-client-urls "$url" \
    --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 \
    --initial-cluster default=http://127.0.0.1:2380 --logger zap "${tls[@]}"
member=(--etcd "$url" --tls-ca "$work/ca.pem" --tls-cert "$work/member.pem" --tls-key "$work/key.pem")
member+=(--model "$model" --kv-dtype bf16 --kv-memory 0.5 --lease-s 30)
# Both are on one host: shared memory would go past the wire.
worker=("$program" worker "${member[@]}" --transports tcp)
start "$left" prefill "${worker[@]}" --device cpu@0 --role prefill --chunk "$chunk" --listen-control "$here:7000"
says prefill joined
start "$right" decode "${worker[@]}" --device cpu@1 --role decode --listen-control "$there:7000"
says decode "exchanges KV"
start "$left" router "$program" router "${member[@]}" --listen 127.0.0.1:8000
says router "ready: http"

export model tokens chunk factor rounds left
ip netns exec "$left" python3 hwtests/overlap.py
