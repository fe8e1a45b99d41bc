"""A server of lines in capitals with a multiplexor of its own: a handle for each thread, a message for each read.

    python3 mux.py 127.0.0.1:7007
"""

import sys
import threading

from towpath import Mux

THREADS = 4


def serve(handle: Mux) -> None:
    with handle:
        # The message comes to whichever thread is free; the answer goes to the connection that it came from.
        for message in handle:
            try:
                handle.send(message.bytes.upper())
            except BrokenPipeError:
                pass  # Who asked has gone: the others have not.


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
            # What was read is still answered; then the threads' loops end.
            mux.drain()


if __name__ == "__main__":
    main()
