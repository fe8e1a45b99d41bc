# Sourced by the scripts of the guides: two hosts and the machine between them, in private network namespaces.
#
#   client 10.0.0.1 -- wan   this namespace   lan -- server 10.0.0.2 (bridge) or 10.0.1.1 (router)
#
# The namespaces are private to the script and disappear when it ends. It needs root and ip(8).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
if [ "${1-}" != inside ]; then
    exec unshare --net --mount --pid --fork --kill-child --mount-proc "$0" inside
fi
mount -t tmpfs tmpfs /run
work=$(mktemp -d /run/guide.XXXXXX)
cd "$work"
ip netns add client
ip netns add server
ip link add wan type veth peer name eth0 netns client
ip link add lan type veth peer name eth0 netns server
ip link set wan up
ip link set lan up

# host NAME ADDRESS [GATEWAY]: configures the interface of a host.
host() {
    ip -n "$1" link set lo up
    ip -n "$1" addr add "$2" dev eth0
    ip -n "$1" link set eth0 up
    [ -z "${3-}" ] || ip -n "$1" route add default via "$3"
}

# start CONFIG: starts the engine and waits until its control socket answers.
start() {
    cp "$here"/"$1".toml "$here"/"$1".ipfw .
    towpath run --check "$1".toml
    towpath run "$1".toml 2>engine.log &
    export TOWPATH_CONTROL="$work/control.sock"
    for _ in $(seq 100); do
        towpath ctl show stats >/dev/null 2>&1 && return
        sleep 0.1
    done
    cat engine.log >&2
    exit 1
}

# on HOST PYTHON: runs a short Python program on a host.
on() {
    ip netns exec "$1" timeout 20 python3 -c "$2"
}
