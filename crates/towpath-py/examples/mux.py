"""A server that answers each line in upper case, with an in-process multiplexor: one handle per thread, one message per read.

    python3 mux.py 127.0.0.1:7007
"""

import sys
import threading

from towpath import Mux

THREADS = 4


def serve(handle: Mux) -> None:
    with handle:
        # A message goes to any free thread. The reply goes to the message's connection.
        for message in handle:
            try:
                handle.send(message.bytes.upper())
            except BrokenPipeError:
                pass  # Only the connection of this message has ended.


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: mux.py HOST:PORT")
    with Mux("line") as mux:
        host, port = mux.listen(sys.argv[1])
        print(f"listening on {host}:{port}", flush=True)
        threads = [threading.Thread(target=serve, args=(mux.clone(),)) for _ in range(THREADS)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            # Messages already read are still answered; then the loops of the threads end.
            mux.drain()


if __name__ == "__main__":
    main()
