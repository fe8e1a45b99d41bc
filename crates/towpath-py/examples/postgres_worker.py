"""A server with the PostgreSQL protocol that answers each query with one row: the text of the query.

    towpath mux 127.0.0.1:5433 --framing postgres-frontend --workers 4 --worker "python3 postgres_worker.py"
    psql "host=127.0.0.1 port=5433 sslmode=disable user=guest" -c "select 1"
"""

import struct

from towpath import Worker

SSL_REQUEST, GSS_REQUEST, CANCEL_REQUEST = 80877103, 80877104, 80877102


def packet(kind: bytes, *parts: bytes) -> bytes:
    """A message of the server: type, length including itself, body."""
    body = b"".join(parts)
    return kind + struct.pack("!i", len(body) + 4) + body


READY = packet(b"Z", b"I")


def start(request: bytes) -> bytes:
    """The answer to a first message, which has no type."""
    (code,) = struct.unpack_from("!i", request, 4)
    if code in (SSL_REQUEST, GSS_REQUEST):
        return b"N"
    if code == CANCEL_REQUEST:
        return b""
    settings = {b"server_version": b"15.0", b"client_encoding": b"UTF8"}
    status = [packet(b"S", name, b"\0", value, b"\0") for name, value in settings.items()]
    return packet(b"R", struct.pack("!i", 0)) + b"".join(status) + READY


def query(text: bytes) -> bytes:
    """One column of type text (object identifier 25), one row."""
    column = packet(b"T", struct.pack("!h", 1), b"query\0", struct.pack("!ihihih", 0, 0, 25, -1, -1, 0))
    row = packet(b"D", struct.pack("!hi", 1, len(text)), text)
    return column + row + packet(b"C", b"SELECT 1\0") + READY


def answer(request: bytes) -> bytes:
    match request[:1]:
        case b"\0":
            return start(request)
        case b"Q":
            return query(request[5:-1])
        case b"X":
            return b""
    return packet(b"E", b"SERROR\0C0A000\0Msimple queries only\0\0") + READY


with Worker() as worker:
    for message in worker:
        if reply := answer(message.bytes):
            message.reply(reply)
        else:
            message.done()
