"""A WebSocket server that echoes messages, answers pings, and closes with the handshake of RFC 6455, section 7."""

import base64
import hashlib
import struct
from enum import IntEnum

from towpath import Ended, Opened, Worker

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Opcode(IntEnum):
    """RFC 6455, section 5.2."""

    CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10


def handshake(request):
    head = dict(line.split(b": ", 1) for line in request.split(b"\r\n")[1:] if line)
    key = {name.lower(): value for name, value in head.items()}[b"sec-websocket-key"]
    accept = base64.b64encode(hashlib.sha1(key + GUID).digest())
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"
    )


def parse(frame):
    """Whether it is the last one of its message, the opcode, and the payload without its mask."""
    size, at = frame[1] & 0x7F, 2
    if size == 126:
        (size,), at = struct.unpack_from("!H", frame, 2), 4
    elif size == 127:
        (size,), at = struct.unpack_from("!Q", frame, 2), 10
    assert frame[1] & 0x80, "a client masks"
    mask, payload = frame[at : at + 4], frame[at + 4 :]
    assert len(payload) == size
    pad = (mask * (size // 4 + 1))[:size]
    plain = (int.from_bytes(payload, "big") ^ int.from_bytes(pad, "big")).to_bytes(size, "big")
    return bool(frame[0] & 0x80), frame[0] & 15, plain


def frame(opcode, payload):
    size = len(payload)
    if size < 126:
        return bytes([0x80 | opcode, size]) + payload
    if size < 1 << 16:
        return bytes([0x80 | opcode, 126]) + struct.pack("!H", size) + payload
    return bytes([0x80 | opcode, 127]) + struct.pack("!Q", size) + payload


class Connection:
    def __init__(self):
        self.upgraded, self.closing, self.kind, self.parts = False, False, None, []

    def handle(self, message):
        if not self.upgraded:
            self.upgraded = True
            return message.reply(handshake(message.bytes))
        last, opcode, payload = parse(message.bytes)
        match opcode:
            case Opcode.CLOSE:
                # The server ends the connection: after its answer, or when the client answered its close.
                if self.closing:
                    message.close()
                else:
                    message.reply(frame(Opcode.CLOSE, payload[:2]), close=True)
            case Opcode.PING:
                message.reply(frame(Opcode.PONG, payload))
            case Opcode.CONTINUATION | Opcode.TEXT | Opcode.BINARY:
                self.kind = self.kind or opcode
                self.parts.append(payload)
                if last:
                    kind, whole = self.kind, b"".join(self.parts)
                    self.kind, self.parts = None, []
                    self.message(message, kind, whole)

    def message(self, message, kind, whole):
        if kind == Opcode.TEXT and whole.startswith(b"close "):
            self.closing = True
            code, reason = whole.split(b" ", 2)[1:]
            message.reply(frame(Opcode.CLOSE, struct.pack("!H", int(code)) + reason))
        elif not self.closing:
            message.reply(frame(kind, whole))


with Worker(events=True) as worker:
    connections = {}
    for event in worker:
        match event:
            case Opened():
                connections[event.connection] = Connection()
            case Ended():
                del connections[event.connection]
            case _:
                connections[event.connection].handle(event)
