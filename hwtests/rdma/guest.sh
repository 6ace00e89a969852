# What a guest does in its role: alone, server, client, prefill or decode. Its exit status is the guest's.

server=10.9.0.1
# where a server guest takes commands; nothing but the other guest can reach it
shell_port=9001

# start_server ADDRESS: a server process; its descriptor is in $descriptor
start_server() {
    mkfifo in out
    rdma_check server "$1" <in >out &
    # open as long as the guest runs: the server ends with its input
    exec 9>in
    read -r descriptor <out
}

# remote COMMAND: runs it on the guest that takes commands
remote() { echo "$1" | nc "${shell:-$server}" "$shell_port"; }

# switch_off: that guest; it returns no output
switch_off() { echo 'echo o >/proc/sysrq-trigger' | timeout 2 nc "${shell:-$server}" "$shell_port" || true; }

# ours SLICE DEPTH PAIRS MEGABYTES SPIN_US, in MB/s
ours() {
    rdma_check bench "$descriptor" "$1" "$2" "$3" "$4" "$5" | awk '{print $1}'
}

# theirs PEER SLICE DEPTH PAIRS MEGABYTES, in MB/s
theirs() {
    common="-d rxe0 -x 1 -s $2 -t $3 -q $4 -n $(($5 * 1000000 / $2 / $4)) -m 4096 -F"
    command="ib_write_bw $common >perftest 2>&1 & until netstat -ltn | grep -q ':18515 '; do :; done"
    if [ "$1" = "$server" ]; then remote "$command"; else eval "$command"; fi
    # shellcheck disable=SC2086 # a list of words
    ib_write_bw $common "$1" >perftest.client 2>&1 || cat perftest.client >&2
    # its MB are MiB
    awk -v size="$2" '$1 == size {print $4 * 1.048576}' perftest.client
}

# compare PEER ROUNDS MEGABYTES: in turns, and the medians. They are reported, not judged: no test depends on
# timing. ib_write_bw never sleeps, so ours is measured both without sleeping and with its defaults.
compare() {
    for round in $(seq "$2"); do
        echo "$(ours 65536 128 2 "$3" 60000000) $(ours 65536 128 2 "$3" 20) $(theirs "$1" 65536 128 2 "$3")"
    done >rates
    median() { cut -d ' ' -f "$1" rates | sort -n | sed -n "$((($2 + 1) / 2))p"; }
    echo "bench 65536 bytes, depth 128, 2 queue pairs, MB/s (ours; ours, sleeping; ib_write_bw): $(tr '\n' '|' <rates)"
    echo "$(median 1 "$2") $(median 2 "$2") $(median 3 "$2")" | awk '{printf \
        "bench medians: ours %.1f MB/s (%.0f %%), sleeping %.1f (%.0f %%), ib_write_bw %.1f\n", \
        $1, 100 * $1 / $3, $2, 100 * $2 / $3, $3}'
}

# Until the server guest answers.
until_reachable() { until ping -c 1 -W 1 "$server" >/dev/null 2>&1; do :; done; }

# what a process of the fleet shows
certificates="--tls-ca /fleet/ca.pem --tls-cert /fleet/member.pem --tls-key /fleet/member.key"

# member COMMAND ARGUMENT..: runs it as a member of the fleet; patient, for an emulated machine is slow
member() {
    command=$1
    shift
    # shellcheck disable=SC2086 # lists of words, as of "fleet status"
    mixfleet $command --etcd "https://$server:2379" $certificates --lease-s 30 "$@"
}

# worker ARGUMENT..: a worker of the model that is served, under this guest's address
worker() {
    # shellcheck disable=SC2046 # a list of words
    member worker $(cat /fleet/model) --device cpu --listen-control "$address:7000" "$@"
}

# text_in FILE: the text of an answer, as JSON writes it
text_in() { sed -n 's/.*"text":\("\([^"\\]\|\\.\)*"\).*/\1/p' "$1"; }

# over_both DEVICES: the tokens of an instance over a device of this guest and one that the other lends
over_both() {
    # shellcheck disable=SC2046,SC2086 # lists of words
    mixfleet generate $(cat /fleet/model) --device "$1" $certificates --json --temperature 0 --ignore-eos \
        --max-tokens 48 --prompt-ids "$(cat /fleet/prompt)" >together 2>together.log
    if [ "$(text_in together)" = "$(cat /fleet/text)" ]; then
        echo "ok      members: the tokens of one machine by $1"
    elif [ "${1#attn:}" != "$1" ] && grep -q "latent attention cannot run on separate devices" together.log; then
        echo "ok      members: $1 is refused for latent attention"
    else
        echo "FAILED  members: other tokens than one machine gives by $1: $(cat together together.log)"
        status=1
    fi
}

# until_said FILE TEXT [TIMES]: until this many lines of a log contain the text
until_said() { until [ "$(grep -c "$2" "$1" 2>/dev/null)" -ge "${3:-1}" ]; do sleep 0.2; done; }

# expect WHAT FILE WORDS: one line that says how it went
expect() {
    if found=$(grep -m 1 "$3" "$2"); then
        echo "ok      $1: $found"
    else
        echo "FAILED  $1: no '$3' in:"
        tail -n 20 "$2"
        status=1
    fi
}

case $role in
alone)
    rdma_check self || exit
    # 64 MiB take a NIC in software too long
    echo "SKIPPED: RDMA: a batch of 64 MiB (minutes in an emulated machine)"
    conformance --test-threads=2 --skip big_batches_land || exit
    start_server 127.0.0.1
    compare 127.0.0.1 5 20
    for slice in 16384 262144 1048576; do
        echo "bench $slice bytes, depth 128, 2 queue pairs: ours $(ours "$slice" 128 2 20 60000000) MB/s"
    done
    rdma_check cut "$descriptor" /bin/ip link set eth0 down || exit
    rdma_check absent 'no active port'
    ;;
server)
    start_server "$server"
    echo "$descriptor" >descriptor
    # until it is switched off
    while :; do nc -l -p "$shell_port" -e /bin/sh; done
    ;;
client)
    until_reachable
    until descriptor=$(remote 'cat descriptor' 2>/dev/null) && [ -n "$descriptor" ]; do :; done
    rdma_check client "$descriptor" || exit
    compare "$server" 3 10
    rdma_check cut "$descriptor" /bin/ip link set eth0 down || exit
    /bin/ip link set eth0 up
    until_reachable
    rdma_check client "$descriptor" || exit
    rdma_check cut "$descriptor" \
        sh -c "echo 'echo o >/proc/sysrq-trigger' | timeout 2 nc $server $shell_port || true"
    ;;
prefill)
    # etcd, the router, the client, and the worker that computes prompts
    status=0 shell=10.9.0.2
    etcd --data-dir etcd --listen-client-urls "https://$server:2379" --advertise-client-urls "https://$server:2379" \
        --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 \
        --initial-cluster default=http://127.0.0.1:2380 --cert-file /fleet/member.pem --key-file /fleet/member.key \
        --trusted-ca-file /fleet/ca.pem --client-cert-auth --unsafe-no-fsync >etcd.log 2>&1 &
    worker --role prefill --trusted-fabric 2>worker.log &
    # shellcheck disable=SC2046 # a list of words
    member router $(cat /fleet/model) --listen 127.0.0.1:8000 --name served 2>router.log &
    until_said router.log 'uses a worker process' 2
    until wget -q -O answer --header 'content-type: application/json' --post-file /fleet/request \
        http://127.0.0.1:8000/v1/completions; do sleep 0.5; done
    text=$(text_in answer)
    if [ -n "$text" ] && [ "$text" = "$(cat /fleet/text)" ]; then
        echo "ok      serve: the tokens of one machine: $(head -c 60 /fleet/text)"
    else
        echo "FAILED  serve: other tokens than one machine gives: $(cat answer)"
        status=1
    fi
    expect 'serve: placed' router.log 'placed'
    expect 'serve: KV by RDMA' worker.log 'KV goes this way.*verbs.*RoCE v2 over IPv4'
    if grep 'KV transfer failed' worker.log; then echo 'FAILED  serve: transfers failed'; status=1; fi
    member 'fleet status' >status 2>&1
    sed 's/^/status  /' status
    expect 'serve: the link is told' status ' <-> .*verbs (rxe0 by RoCE v2 over IPv4, MTU 4096)'
    lent="remote:rdma:$shell:7100"
    over_both "tp:cpu,$lent"
    over_both "attn:cpu,$lent"
    remote 'cat member.log' >member.log
    expect 'members: lent over RDMA' member.log 'a process uses the device'
    remote 'cat refused.log' >refused.log
    expect 'serve: RDMA is not used unasked' refused.log 'not offered.*rxe0 is available, but'
    switch_off
    exit "$status"
    ;;
decode)
    until_reachable
    worker --role decode 2>refused.log &
    until_said refused.log 'not offered'
    kill "$(pidof mixfleet)"
    wait
    worker --role decode --trusted-fabric 2>worker.log &
    # shellcheck disable=SC2086 # a list of words
    mixfleet member --device cpu --listen "rdma:$address:7100" $certificates 2>member.log &
    while :; do nc -l -p "$shell_port" -e /bin/sh; done
    ;;
esac
