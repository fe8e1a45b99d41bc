"""Sends a file over TCP without copying it into the kernel, one MiB at a time, and prints the byte counts.

    nc -l 7007 > copy & python3 sender.py 127.0.0.1:7007 file
"""

import socket
import sys

from towpath import Sender

BUFFERS = 8
SIZE = 1 << 20


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: sender.py HOST:PORT FILE")
    host, port = sys.argv[1].rsplit(":", 1)
    free = [bytearray(SIZE) for _ in range(BUFFERS)]
    with open(sys.argv[2], "rb") as file, socket.create_connection((host, int(port))) as stream:
        # The exit waits until everything is sent, and raises the error otherwise.
        with Sender(stream) as sender:
            while True:
                while not free:
                    free = sender.reclaim()
                    if not free:
                        sender.drain()
                buffer = free.pop()
                length = file.readinto(buffer)
                if not length:
                    break
                # The kernel reads the buffer until reclaim returns it; do not write to it.
                sender.queue(memoryview(buffer)[:length], id=buffer)
    counted = sender.counters
    print(
        f"{counted.zerocopy_bytes} bytes without a copy (of these, the kernel copied {counted.copied_bytes}), "
        f"{counted.plain_bytes} plain"
    )


if __name__ == "__main__":
    main()
