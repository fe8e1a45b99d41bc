"""A PostgreSQL server that adds numbers, with simple and prepared queries. A worker keeps the statements of its connections."""

import re
import struct

from towpath import Ended, Opened, Worker

SSL_REQUEST, GSS_REQUEST = 80877103, 80877104
NUMBER = 20  # the type int8


def packet(kind, *parts):
    body = b"".join(parts)
    return kind + struct.pack("!i", len(body) + 4) + body


def strings(body, count):
    """Strings that end with a zero byte, and the rest."""
    *found, rest = body.split(b"\0", count)
    return found, rest


READY = packet(b"Z", b"I")
COLUMN = packet(b"T", struct.pack("!h", 1), b"sum\0", struct.pack("!ihihih", 0, 0, NUMBER, 8, -1, 0))
ERROR = packet(b"E", b"SERROR\0C42601\0Mnot a sum\0\0")


def parameters(body):
    """The values of a Bind, as text."""
    (formats,) = struct.unpack_from("!h", body)
    assert not any(struct.unpack_from(f"!{formats}h", body, 2))
    at = 2 + 2 * formats
    (count,), at, values = struct.unpack_from("!h", body, at), at + 2, []
    for _ in range(count):
        (size,) = struct.unpack_from("!i", body, at)
        values.append(body[at + 4 : at + 4 + size])
        at += 4 + size
    return values


def run(query):
    """`select A + B`: a row, or an error."""
    found = re.fullmatch(rb"\s*select (\d+) \+ (\d+)[^;]*;?\s*", query)
    if not found:
        return ERROR
    value = b"%d" % (int(found[1]) + int(found[2]))
    return packet(b"D", struct.pack("!hi", 1, len(value)), value) + packet(b"C", b"SELECT 1\0")


class Session:
    def __init__(self):
        self.started, self.statements, self.query = False, {}, b""

    def start(self, message):
        (code,) = struct.unpack_from("!i", message, 4)
        if code in (SSL_REQUEST, GSS_REQUEST):
            return b"N"
        self.started = True
        settings = {b"server_version": b"15.0", b"client_encoding": b"UTF8", b"standard_conforming_strings": b"on"}
        status = [packet(b"S", name, b"\0", value, b"\0") for name, value in settings.items()]
        return packet(b"R", struct.pack("!i", 0)) + b"".join(status) + READY

    def answer(self, message):
        if not self.started:
            return self.start(message)
        body = message[5:]
        match message[:1]:
            case b"Q":
                rows = run(body[:-1])
                return (rows if rows == ERROR else COLUMN + rows) + READY
            case b"P":
                (name, query), _ = strings(body, 2)
                self.statements[name] = query
                return packet(b"1")
            case b"B":
                (_, name), rest = strings(body, 2)
                self.query = self.statements[name]
                for number, value in enumerate(parameters(rest), 1):
                    self.query = self.query.replace(b"$%d" % number, value)
                return packet(b"2")
            case b"D":
                return COLUMN
            case b"E":
                return run(self.query)
            case b"S":
                return READY
            case b"X":
                return b""
        return ERROR + READY


with Worker(events=True) as worker:
    sessions = {}
    for event in worker:
        match event:
            case Opened():
                sessions[event.connection] = Session()
            case Ended():
                del sessions[event.connection]
            case _:
                if text := sessions[event.connection].answer(event.bytes):
                    event.reply(text)
                elif event.bytes[:1] == b"X":
                    event.close()
