"""A MySQL server that greets, and knows a few queries. Each connection has a session, which the worker keeps."""

import os
import re
import struct

from towpath import Ended, Opened, Worker

CAPABILITIES = 0x0008_A20F  # long passwords, found rows, long flags, a database, protocol 4.1, transactions, authentication plugins
AUTOCOMMIT = 2
QUIT = 1


def packet(sequence, payload):
    return struct.pack("<I", len(payload))[:3] + bytes([sequence & 255]) + payload


def payload(chain):
    """The payloads of the packets of a message: one of 0xffffff bytes continues in the next packet."""
    parts, at = [], 0
    while at < len(chain):
        size = int.from_bytes(chain[at : at + 3], "little")
        parts.append(chain[at + 4 : at + 4 + size])
        at += 4 + size
    return b"".join(parts)


def text(value):
    assert len(value) < 251
    return bytes([len(value)]) + value


def greeting():
    head = b"\x0a8.0.0-towpath\0" + struct.pack("<I", 1) + b"12345678\0"
    flags = struct.pack("<HBHHB", CAPABILITIES & 0xFFFF, 33, AUTOCOMMIT, CAPABILITIES >> 16, 21)
    return packet(0, head + flags + bytes(10) + b"123456789012\0" + b"mysql_native_password\0")


def ok():
    return b"\0\0\0" + struct.pack("<HH", AUTOCOMMIT, 0)


def error(number, state, reason):
    return b"\xff" + struct.pack("<H", number) + b"#" + state + reason


def rows(values):
    """The packets of a result with one column."""
    end = b"\xfe" + struct.pack("<HH", 0, AUTOCOMMIT)
    names = b"".join(text(name) for name in (b"def", b"", b"", b"", b"value", b""))
    column = names + b"\x0c" + struct.pack("<HIBHBH", 33, 1024, 0xFD, 0, 0, 0)
    return [b"\1", column, end, *(text(value) for value in values), end]


def answer(command, session):
    """COM_INIT_DB is 2, COM_QUERY 3, COM_PING 14."""
    match command[0], command[1:]:
        case (0x03, query) if found := re.fullmatch(rb"select '(.*)'", query):
            return rows([found[1]])
        case 0x03, b"select count":
            session["count"] += 1
            return rows([b"%d" % session["count"]])
        case (0x03, query) if found := re.fullmatch(rb"select (\d+) rows", query):
            return rows(b"%d" % number for number in range(int(found[1])))
        case (0x03, query) if query.startswith(b"select length"):
            return rows([b"%d" % len(query)])
        case 0x03, b"select worker":
            return rows([b"%d" % os.getpid()])
        case 0x03, b"fail":
            return [error(1064, b"42000", b"a reason")]
        case (0x02 | 0x03 | 0x0E, _):
            return [ok()]
    return [error(1047, b"08S01", b"unknown command")]


with Worker(events=True) as worker:
    sessions = {}
    for event in worker:
        match event:
            case Opened():
                sessions[event.connection] = None
                event.reply(greeting())
            case Ended():
                del sessions[event.connection]
            case _:
                sequence, session = event.bytes[3], sessions[event.connection]
                if session is None:
                    # The client's part of the handshake: every name and password is accepted.
                    sessions[event.connection] = {"count": 0}
                    event.reply(packet(sequence + 1, ok()))
                elif event.bytes[4] == QUIT:
                    event.close()
                else:
                    # The packets of a chain are numbered; the answer continues.
                    size = len(event.bytes)
                    last = sequence + (size - 1) // (0xFFFFFF + 4)
                    packets = answer(payload(event.bytes), session)
                    event.reply(b"".join(packet(last + 1 + at, part) for at, part in enumerate(packets)))
