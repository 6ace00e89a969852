# What a guest does in its role: alone, server or client. Its exit status is the guest's.

server=10.9.0.1
# where a server guest takes commands; nothing but the other guest can reach it
shell_port=9001

# start_server ADDRESS: a server process; its descriptor is in $descriptor
start_server() {
    mkfifo /tmp/in /tmp/out
    rdma_check server "$1" </tmp/in >/tmp/out &
    # open as long as the guest runs: the server ends with its input
    exec 9>/tmp/in
    read -r descriptor </tmp/out
}

# remote COMMAND: runs it on the server guest
remote() { echo "$1" | nc "$server" "$shell_port"; }

# ours SLICE DEPTH PAIRS MEGABYTES SPIN_US, in MB/s
ours() {
    rdma_check bench "$descriptor" "$1" "$2" "$3" "$4" "$5" | awk '{print $1}'
}

# theirs PEER SLICE DEPTH PAIRS MEGABYTES, in MB/s
theirs() {
    common="-d rxe0 -x 1 -s $2 -t $3 -q $4 -n $(($5 * 1000000 / $2 / $4)) -m 4096 -F"
    command="ib_write_bw $common >/tmp/perftest 2>&1 & until netstat -ltn | grep -q ':18515 '; do :; done"
    if [ "$1" = "$server" ]; then remote "$command"; else eval "$command"; fi
    # shellcheck disable=SC2086 # a list of words
    ib_write_bw $common "$1" >/tmp/perftest.client 2>&1 || cat /tmp/perftest.client >&2
    # its MB are MiB
    awk -v size="$2" '$1 == size {print $4 * 1.048576}' /tmp/perftest.client
}

# compare PEER ROUNDS MEGABYTES: in turns, and the medians. They are told, not judged: a clock decides no test.
# ib_write_bw never sleeps, so ours is measured without sleeping and as it is by default.
compare() {
    for round in $(seq "$2"); do
        echo "$(ours 65536 128 2 "$3" 60000000) $(ours 65536 128 2 "$3" 20) $(theirs "$1" 65536 128 2 "$3")"
    done >/tmp/rates
    median() { cut -d ' ' -f "$1" /tmp/rates | sort -n | sed -n "$((($2 + 1) / 2))p"; }
    echo "bench 65536 bytes, depth 128, 2 queue pairs, MB/s (ours; ours, sleeping; ib_write_bw): $(tr '\n' '|' </tmp/rates)"
    echo "$(median 1 "$2") $(median 2 "$2") $(median 3 "$2")" | awk '{printf \
        "bench medians: ours %.1f MB/s (%.0f %%), sleeping %.1f (%.0f %%), ib_write_bw %.1f\n", \
        $1, 100 * $1 / $3, $2, 100 * $2 / $3, $3}'
}

# Until the server guest answers.
until_reachable() { until ping -c 1 -W 1 "$server" >/dev/null 2>&1; do :; done; }

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
    echo "$descriptor" >/tmp/descriptor
    # until it is switched off
    while :; do nc -l -p "$shell_port" -e /bin/sh; done
    ;;
client)
    until_reachable
    until descriptor=$(remote 'cat /tmp/descriptor' 2>/dev/null) && [ -n "$descriptor" ]; do :; done
    rdma_check client "$descriptor" || exit
    compare "$server" 3 10
    rdma_check cut "$descriptor" /bin/ip link set eth0 down || exit
    /bin/ip link set eth0 up
    until_reachable
    rdma_check client "$descriptor" || exit
    rdma_check cut "$descriptor" \
        sh -c "echo 'echo o >/proc/sysrq-trigger' | timeout 2 nc $server $shell_port || true"
    ;;
esac
