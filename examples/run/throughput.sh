#!/bin/bash
# Measures the throughput of a bridge of `towpath run` between two veth pairs in private network namespaces:
#
#   A (10.9.0.1) a0 == wan [towpath run: 20 rules, keep-state] lan == b0 B (10.9.0.2)
#
# throughput.sh [DRIVER...]   af_packet, af_xdp, offload (af_packet with large segments); default: all three
#
# af_packet and af_xdp: UDP of 64 bytes in 2,000 flows at the rate of one core, counted at B's interface. offload: TCP with iperf3.
# It needs root, the release builds of `towpath` and of the example `forward` of towpath-port, iproute2, iptables, and iperf3 for TCP.
# PEER="COMMAND wan lan" runs another forwarder in place of towpath. SECONDS_EACH=2 and REPS=3 are the defaults.
set -eu
cd "$(dirname "$0")/../.."
towpath=$PWD/target/release/towpath
forward=$PWD/target/release/examples/forward
seconds=${SECONDS_EACH:-2}
work=$(mktemp -d)
names="tpA$$ tpM$$ tpB$$"
set -- "${@:-all}"
[ "$1" = all ] && set -- af_packet af_xdp offload

finish() {
    [ -n "${engine:-}" ] && kill "$engine" 2> /dev/null && wait "$engine" || true
    for name in $names; do ip netns del "$name" 2> /dev/null || true; done
    rm -rf "$work"
}
trap finish EXIT

read -r a m b <<< "$names"
for name in $names; do
    ip netns add "$name"
    ip netns exec "$name" sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1
done
ip link add a0 netns "$a" address 02:00:00:00:00:0a type veth peer name wan netns "$m"
ip link add b0 netns "$b" address 02:00:00:00:00:0b type veth peer name lan netns "$m"
ip -n "$a" addr add 10.9.0.1/24 dev a0
ip -n "$b" addr add 10.9.0.2/24 dev b0
for end in "$a a0" "$m wan" "$m lan" "$b b0"; do ip -n ${end% *} link set ${end#* } up; done
ip -n "$a" neigh replace 10.9.0.2 lladdr 02:00:00:00:00:0b dev a0
ip -n "$b" neigh replace 10.9.0.1 lladdr 02:00:00:00:00:0a dev b0
# B drops the packets at the lowest cost.
ip netns exec "$b" iptables-legacy -t raw -A PREROUTING -p udp -j DROP

{
    echo 'add check-state'
    echo 'add allow layer2 mac-type arp'
    for n in $(seq 17); do echo "add deny tcp from 192.168.$n.0/24 to any $((6000 + n))"; done
    echo 'add allow ip from any to any keep-state'
} > "$work/rules"

# Starts the engine, or the peer, on the second core.
start() {
    if [ -n "${PEER:-}" ]; then
        ip netns exec "$m" taskset -c 1 $PEER > "$work/said" 2>&1 &
        engine=$!
        sleep 1
        return
    fi
    local driver=$1 port=''
    [ "$driver" = offload ] && driver=af_packet port='offload = true'
    cat > "$work/t.toml" << END
rules = "rules"
[port.wan]
driver = "$driver"
$port
[port.lan]
driver = "$driver"
$port
[[bridge]]
ports = ["wan", "lan"]
[engine]
cpus = [1]
wait = "spin"
[control]
socket = "ctl.sock"
END
    ip netns exec "$m" "$towpath" run "$work/t.toml" > "$work/said" 2>&1 &
    engine=$!
    for _ in $(seq 100); do
        "$towpath" ctl --socket "$work/ctl.sock" show stats > /dev/null 2>&1 && return
        sleep 0.05
    done
    cat "$work/said" >&2
    exit 1
}

stop() {
    kill "$engine" && wait "$engine" || true
    engine=
}

received() { ip netns exec "$b" awk '$1 == "b0:" { print $3 }' /proc/net/dev; }

for driver in "$@"; do
    for _ in $(seq "${REPS:-3}"); do
        start "$driver"
        if [ "$driver" = offload ]; then
            ip netns exec "$b" iperf3 -s -1 > /dev/null 2>&1 &
            sleep 0.5
            rate=$(ip netns exec "$a" iperf3 -c 10.9.0.2 -t "$seconds" -J |
                awk -F'[:,]' '/"sum_received"/ { sum = 1 } sum && /"bits_per_second"/ { printf "%.2f", $2 / 1e9; exit }')
            echo "$driver: TCP $rate Gbit/s"
        else
            before=$(received)
            sent=$(ip netns exec "$a" taskset -c 0 "$forward" \
                "generator:flows=2000 size=106" packet:a0 --seconds "$seconds" 2> /dev/null | sed -n 's/^a0:.*sent \([0-9]*\) .*/\1/p')
            sleep 0.3
            got=$(($(received) - before))
            echo "$driver: $((got / seconds / 1000)) k/s of $((sent / seconds / 1000)) k/s, lost $(((sent - got) * 1000 / sent)) permille"
        fi
        stop
    done
done
