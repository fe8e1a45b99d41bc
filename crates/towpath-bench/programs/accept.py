"""Accepts all packets of a queue with python-netfilterqueue: accept.py QUEUE. Prints "ready" when the queue is open."""
import socket
import sys

from netfilterqueue import NetfilterQueue

queue = NetfilterQueue()
queue.bind(int(sys.argv[1]), lambda packet: packet.accept(), max_len=20000, sock_len=32 << 20)
descriptor = socket.socket(fileno=queue.get_fd())
descriptor.setsockopt(270, 5, 1)  # SOL_NETLINK, NETLINK_NO_ENOBUFS
descriptor.detach()  # The queue's own.
print("ready", flush=True)
while True:
    try:
        queue.run()
    except OSError:
        pass  # ENOBUFS
