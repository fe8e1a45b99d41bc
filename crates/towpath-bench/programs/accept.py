"""Accepts all packets of a queue with python-netfilterqueue: accept.py QUEUE. Prints "ready" when the queue is open."""
import socket
import sys

from netfilterqueue import NetfilterQueue

queue = NetfilterQueue()
queue.bind(int(sys.argv[1]), lambda packet: packet.accept(), max_len=20000, sock_len=32 << 20)
socket.socket(fileno=queue.get_fd()).setsockopt(270, 5, 1)  # SOL_NETLINK, NETLINK_NO_ENOBUFS
print("ready", flush=True)
while True:
    try:
        queue.run()
    except OSError:
        pass  # ENOBUFS
