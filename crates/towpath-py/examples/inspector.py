"""An inspector: drops every packet whose payload contains a word. Copy it to start your own.

    towpath replay capture.pcap --rules rules.ipfw --queue 1="python3 inspector.py password"
"""

import sys

from towpath import Inspector, Verdict


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: inspector.py WORD")
    word = sys.argv[1].encode()
    seen = dropped = 0
    # Towpath starts this program and sets TOWPATH_SOCKET.
    with Inspector() as queue:
        while batch := queue.recv_batch(64):
            for frame in batch:
                found = word in frame.payload
                seen += 1
                dropped += found
                frame.verdict(Verdict.DROP if found else Verdict.PASS)
    print(f"inspector: {seen} packets, {dropped} dropped", file=sys.stderr)


if __name__ == "__main__":
    main()
