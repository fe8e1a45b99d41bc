"""An unmodified program for python-netfilterqueue: every third packet is dropped, every third one is changed, the others pass with a mark.

filter.py QUEUE [COUNT]: ends after COUNT packets and prints what it saw.
"""
import sys

from netfilterqueue import COPY_PACKET, NetfilterQueue

seen = dropped = changed = wrong = 0
most = int(sys.argv[2]) if len(sys.argv) > 2 else None


def decide(packet):
    global seen, dropped, changed, wrong
    seen += 1
    payload = packet.get_payload()
    if packet.id != seen or packet.hw_protocol != 0x0800 or packet.get_payload_len() != len(payload) or payload[0] != 0x45:
        wrong += 1
    if packet.get_timestamp() <= 0 or len(packet.get_hw()) != 8:
        wrong += 1
    if seen % 3 == 0:
        dropped += 1
        packet.drop()
    elif seen % 3 == 1:
        changed += 1
        packet.set_payload(payload[:-1] + b"!")
        packet.accept()
    else:
        packet.set_mark(0x77)
        packet.accept()
    if seen == most:
        print(f"packets={seen} dropped={dropped} changed={changed} wrong={wrong}", flush=True)
        sys.exit(0)


queue = NetfilterQueue()
queue.bind(int(sys.argv[1]), decide, max_len=4096, mode=COPY_PACKET)
print("bound", flush=True)
try:
    queue.run()
except KeyboardInterrupt:
    pass
finally:
    queue.unbind()
