"""A key-value store with the Redis protocol. Its workers share a SQLite database.

    towpath mux 127.0.0.1:6380 --framing redis --workers 4 --worker "python3 redis_worker.py store.db"
"""

import sqlite3
import sys

from towpath import Worker

store = sqlite3.connect(sys.argv[1], timeout=10, isolation_level=None)
store.execute("CREATE TABLE IF NOT EXISTS items (key BLOB PRIMARY KEY, value BLOB)")


def arguments(request: bytes) -> list[bytes]:
    """The words of a command: an array of bulk strings, or one line of words."""
    if not request.startswith(b"*"):
        return request.split()
    words, at = [], request.index(b"\n") + 1
    while at < len(request):
        line, size = request.index(b"\n", at) + 1, int(request[at + 1 : request.index(b"\r", at)])
        words.append(request[line : line + size])
        at = line + size + 2
    return words


def run(command: bytes, *words: bytes) -> bytes:
    match command.upper(), words:
        case b"PING", ():
            return b"+PONG\r\n"
        case b"SET", (key, value):
            store.execute("REPLACE INTO items VALUES (?, ?)", (key, value))
            return b"+OK\r\n"
        case b"GET", (key,):
            row = store.execute("SELECT value FROM items WHERE key = ?", (key,)).fetchone()
            return b"$%d\r\n%s\r\n" % (len(row[0]), row[0]) if row else b"$-1\r\n"
        case b"DEL", keys:
            return b":%d\r\n" % sum(store.execute("DELETE FROM items WHERE key = ?", (key,)).rowcount for key in keys)
    return b"-ERR unknown command, or wrong number of arguments\r\n"


with Worker() as worker:
    for message in worker:
        message.reply(run(*arguments(message.bytes)))
