"""An inspector that attaches as it should and then writes noise into everything it can write.

Knows nothing of the ring's layout but the hello: it tries to map every descriptor that it was given for writing, and
prints which of them it could. Ends when the engine closes the channel.
"""

import array
import mmap
import os
import random
import socket
import struct
import sys

HELLO = struct.pack("<IH58x", int.from_bytes(b"TPRG", "little"), 7)


def attach():
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(os.environ["TOWPATH_SOCKET"])
    s.send(HELLO)
    fds = array.array("i")
    _, ancillary, _, _ = s.recvmsg(4096, socket.CMSG_SPACE(64 * fds.itemsize))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return s, list(fds)


def writable(fd):
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError):
        return None


def main():
    rng = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    s, fds = attach()
    areas = [area for area in map(writable, fds) if area is not None]
    print(f"garbage: {len(fds)} descriptors, {len(areas)} writable", flush=True)
    s.setblocking(False)
    while True:
        for area in areas:
            # Everything at once, and then single words, so that what follows a good word is seen too.
            area[:] = rng.randbytes(len(area))
            for _ in range(1000):
                at = rng.randrange(len(area) // 8) * 8
                area[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**32 + 1, rng.getrandbits(64)]))
        try:
            s.send(rng.randbytes(rng.randrange(1, 200)))
            if s.recv(4096) == b"":
                return
        except BlockingIOError:
            pass
        except OSError:
            return


main()
