"""A gRPC server with unary methods over HTTP/2 frames. It keeps the header tables and windows of its connections.

The module hpack decodes headers: compression has state, and clients use all of it.
"""

import hashlib
import struct
from enum import IntEnum

from hpack import Decoder, Encoder
from towpath import Ended, Opened, Worker

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 1, 1, 4, 8, 0x20
INITIAL_WINDOW_SIZE = 4
LONGEST = 16384
INVALID_ARGUMENT, UNIMPLEMENTED = 3, 12


class Kind(IntEnum):
    """RFC 9113, section 6."""

    DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9


def frame(kind, flags, stream, payload=b""):
    return struct.pack("!I", len(payload))[1:] + bytes([kind, flags]) + struct.pack("!I", stream) + payload


def call(path, request):
    """A status, its text, and the answer."""
    match path:
        case "/towpath.Words/Upper":
            return 0, "", request.upper()
        case "/towpath.Words/Digest":
            return 0, "", hashlib.sha256(request).hexdigest().encode()
        case "/towpath.Words/Repeat":
            return 0, "", b"x" * int(request)
        case "/towpath.Words/Fail":
            return INVALID_ARGUMENT, request.decode(), b""
    return UNIMPLEMENTED, "no such method", b""


class Stream:
    def __init__(self, window):
        self.headers, self.body, self.window, self.waiting, self.trailers = {}, bytearray(), window, b"", b""


class Connection:
    def __init__(self):
        self.decoder, self.encoder, self.streams = Decoder(), Encoder(), {}
        self.window = self.initial = 65535
        self.block, self.ends = bytearray(), False

    def handle(self, message):
        """The frames that answer a frame."""
        if message.startswith(PREFACE):
            return frame(Kind.SETTINGS, 0, 0)
        kind, flags, (stream,), payload = message[3], message[4], struct.unpack_from("!I", message, 5), message[9:]
        match kind:
            case Kind.SETTINGS if not flags & ACK:
                return self.settings(payload) + frame(Kind.SETTINGS, ACK, 0)
            case Kind.PING if not flags & ACK:
                return frame(Kind.PING, ACK, 0, payload)
            case Kind.WINDOW_UPDATE:
                (more,) = struct.unpack("!I", payload)
                if stream == 0:
                    self.window += more
                elif stream in self.streams:
                    self.streams[stream].window += more
                return self.flush()
            case Kind.HEADERS | Kind.CONTINUATION:
                return self.head(kind, flags, stream, payload)
            case Kind.DATA:
                return self.data(flags, stream, payload)
            case Kind.RST_STREAM:
                self.streams.pop(stream, None)
        return b""

    def settings(self, payload):
        for name, value in struct.iter_unpack("!HI", payload):
            if name == INITIAL_WINDOW_SIZE:
                for stream in self.streams.values():
                    stream.window += value - self.initial
                self.initial = value
        return self.flush()

    def head(self, kind, flags, stream, payload):
        if kind == Kind.HEADERS:
            padding = payload[0] if flags & PADDED else 0
            start = (1 if flags & PADDED else 0) + (5 if flags & PRIORITY else 0)
            self.block, self.ends = bytearray(payload[start : len(payload) - padding]), bool(flags & END_STREAM)
        else:
            self.block += payload
        if not flags & END_HEADERS:
            return b""
        self.streams[stream] = Stream(self.initial)
        self.streams[stream].headers = dict(self.decoder.decode(bytes(self.block)))
        return self.answer(stream) if self.ends else b""

    def data(self, flags, stream, payload):
        size = len(payload)
        if flags & PADDED:
            payload = payload[1 : size - payload[0]]
        update = frame(Kind.WINDOW_UPDATE, 0, 0, struct.pack("!I", size)) if size else b""
        if stream not in self.streams:
            return update
        self.streams[stream].body += payload
        if flags & END_STREAM:
            return update + self.answer(stream)
        return update + (frame(Kind.WINDOW_UPDATE, 0, stream, struct.pack("!I", size)) if size else b"")

    def answer(self, number):
        stream = self.streams[number]
        assert stream.headers[":method"] == "POST" and stream.headers["content-type"] == "application/grpc"
        compressed, size = struct.unpack_from("!BI", stream.body)
        assert not compressed and size == len(stream.body) - 5
        status, text, answer = call(stream.headers[":path"], bytes(stream.body[5:]))
        head = self.encoder.encode([(":status", "200"), ("content-type", "application/grpc", True)])
        # Trailers may leave after those of later calls. Sensitive fields are not put into the table, so that any order is valid.
        stream.trailers = self.encoder.encode([("grpc-status", str(status), True), ("grpc-message", text, True)])
        stream.waiting = b"" if status else struct.pack("!BI", 0, len(answer)) + answer
        return frame(Kind.HEADERS, END_HEADERS, number, head) + self.flush()

    def flush(self):
        """Sends what the windows permit."""
        frames = []
        for number, stream in list(self.streams.items()):
            if not stream.trailers:
                continue
            while stream.waiting and (size := min(len(stream.waiting), self.window, stream.window, LONGEST)) > 0:
                part, stream.waiting = stream.waiting[:size], stream.waiting[size:]
                self.window, stream.window = self.window - size, stream.window - size
                frames.append(frame(Kind.DATA, 0, number, part))
            if not stream.waiting:
                frames.append(frame(Kind.HEADERS, END_HEADERS | END_STREAM, number, stream.trailers))
                del self.streams[number]
        return b"".join(frames)


with Worker(events=True) as worker:
    connections = {}
    for event in worker:
        match event:
            case Opened():
                connections[event.connection] = Connection()
            case Ended():
                del connections[event.connection]
            case _:
                if frames := connections[event.connection].handle(event.bytes):
                    event.reply(frames)
