#!/bin/bash
# Checks that the memory of `towpath run` does not grow: a bridge at a low rate for ten minutes, with an inspector, TCP, reloads and
# `towpath ctl`. Every ten seconds it prints: seconds, KiB of the engine and of its inspector (VmRSS), states, packets, dropped.
#
# soak.sh [SECONDS]
#
# It needs root, the release builds of `towpath` and of the example `forward` of towpath-port, iproute2, iptables and iperf3.
# RATE=20000: UDP packets per second, in 5,000 flows. It fails if the engine grows by more than 4 MiB after the first minute.
set -eu
cd "$(dirname "$0")/../.."
towpath=$PWD/target/release/towpath
forward=$PWD/target/release/examples/forward
seconds=${1:-600}
rate=${RATE:-20000}
work=$(mktemp -d)
a=tsA$$ m=tsM$$ b=tsB$$
started=()

finish() {
    for pid in "${started[@]}"; do kill "$pid" 2> /dev/null || true; done
    wait || true
    for name in $a $m $b; do ip netns del "$name" 2> /dev/null || true; done
    rm -rf "$work"
}
trap finish EXIT

for name in $a $m $b; do
    ip netns add "$name"
    ip netns exec "$name" sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1
done
ip link add a0 netns $a address 02:00:00:00:00:0a type veth peer name wan netns $m
ip link add b0 netns $b address 02:00:00:00:00:0b type veth peer name lan netns $m
ip -n $a addr add 10.9.0.1/24 dev a0
ip -n $b addr add 10.9.0.2/24 dev b0
for end in "$a a0" "$m wan" "$m lan" "$b b0"; do ip -n ${end% *} link set ${end#* } up; done
ip -n $a neigh replace 10.9.0.2 lladdr 02:00:00:00:00:0b dev a0
ip -n $b neigh replace 10.9.0.1 lladdr 02:00:00:00:00:0a dev b0
ip netns exec $b iptables-legacy -t raw -A PREROUTING -p udp -j DROP

rules() {
    echo "add $1 count ip from any to any"
    echo 'add 100 allow layer2 mac-type arp'
    echo 'add 150 divert 1 ip from any to any'
    echo 'add 200 check-state'
    echo 'add 400 allow ip from any to any keep-state'
}
rules 10 > "$work/rules"
cat > "$work/t.toml" << END
rules = "rules"
[port.wan]
driver = "af_packet"
offload = true
[port.lan]
driver = "af_packet"
offload = true
[[bridge]]
ports = ["wan", "lan"]
[queue.1]
command = "towpath inspect --queue 1 --match nothing-like-this --verdict drop"
default = "pass"
[settings]
dyn_udp_lifetime = 5
[control]
socket = "ctl.sock"
END
ip netns exec $m "$towpath" run "$work/t.toml" > "$work/said" 2>&1 &
engine=$!
started+=($engine)
ctl() { "$towpath" ctl --socket "$work/ctl.sock" "$@"; }
for _ in $(seq 100); do ctl show stats > /dev/null 2>&1 && break; sleep 0.1; done

# The highest rate first, so that every buffer reaches its maximum.
ip netns exec $a "$forward" "generator:flows=5000 size=106" packet:a0 --seconds 2 > /dev/null 2>&1

ip netns exec $b iperf3 -s > /dev/null 2>&1 &
started+=($!)
ip netns exec $a "$forward" "generator:flows=5000 size=106 rate=$rate paced=yes" packet:a0 --park --seconds "$seconds" > /dev/null 2>&1 &
started+=($!)
(while sleep 1; do ip netns exec $a iperf3 -c 10.9.0.2 -t 20 -b 20M > /dev/null 2>&1 || true; done) &
started+=($!)

resident() { awk '/^VmRSS/ { print $2 }' "/proc/$1/status"; }
echo "seconds engine_kib inspector_kib states packets dropped"
first=0 last=0
for second in $(seq 10 10 "$seconds"); do
    for n in 1 2; do
        sleep 5
        rules $((10 + (second + n) % 50)) > "$work/next"
        mv "$work/next" "$work/rules"
        kill -HUP $engine
    done
    ctl dump states > /dev/null 2>&1
    for what in rules states queues ports rings; do ctl show $what > /dev/null; done
    inspector=$(pgrep -P $engine | head -1)
    stats=$(ctl show stats --json)
    number() { grep -o "\"$1\":[0-9]*" <<< "$stats" | head -1 | cut -d: -f2; }
    last=$(resident $engine)
    [ "$second" -eq 60 ] && first=$last
    echo "$second $last $(resident "$inspector") $(number left) $(number packets) $(number dropped)"
done
reloads=$(grep -c 'reloaded: ' "$work/said")
grown=$((last - (first > 0 ? first : last)))
echo "$reloads reloads; the engine has grown by $grown KiB since the first minute"
[ "$grown" -le 4096 ]
