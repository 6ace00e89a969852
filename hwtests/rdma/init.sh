#!/bin/sh
# First process of a guest: brings up one soft-RoCE device, runs the job and powers off.
/bin/busybox mkdir -p /usr/bin
/bin/busybox --install -s /usr/bin
export PATH=/bin:/usr/bin HOME=/run TMPDIR=/run
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /run
ulimit -l unlimited
while read -r module; do insmod "/modules/$module"; done </modules/order
for setting in $(cat /proc/cmdline); do
    case $setting in guest.*) export "${setting#guest.}" ;; esac
done
# /bin/ip, not ip: busybox' shell would take its own, which knows less
/bin/ip link set lo up
[ -d /sys/class/net/eth0 ] || /bin/ip link add eth0 type dummy
/bin/ip addr add "$address/24" dev eth0
# packets of 4096 bytes need more than 1500
/bin/ip link set eth0 up mtu 9000
rdma link add rxe0 type rxe netdev eth0
cd /run && sh /job.sh
echo "GUEST-STATUS $?"
poweroff -f
