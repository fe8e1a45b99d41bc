"""A memcached server with the text protocol. Its workers share a SQLite database: memcached_server.py FILE."""

import sqlite3
import sys

from towpath import Worker

store = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
store.execute("CREATE TABLE IF NOT EXISTS items (key BLOB PRIMARY KEY, flags INT, value BLOB, version INT)")
NEXT = "(SELECT coalesce(max(version), 0) + 1 FROM items)"


def find(key):
    return store.execute("SELECT flags, value, version FROM items WHERE key = ?", (key,)).fetchone()


def put(key, flags, value):
    store.execute(f"REPLACE INTO items VALUES (?, ?, ?, {NEXT})", (key, flags, value))


def values(keys, versions):
    parts = []
    for key in keys:
        if found := find(key):
            flags, value, version = found
            suffix = b" %d" % version if versions else b""
            parts.append(b"VALUE %s %d %d%s\r\n%s\r\n" % (key, flags, len(value), suffix, value))
    return b"".join(parts) + b"END\r\n"


def save(verb, key, flags, value, version):
    found = find(key)
    match verb:
        case b"cas" if not found:
            return b"NOT_FOUND\r\n"
        case b"cas" if found[2] != version:
            return b"EXISTS\r\n"
        case b"add" if found:
            return b"NOT_STORED\r\n"
        case b"replace" | b"append" | b"prepend" if not found:
            return b"NOT_STORED\r\n"
        case b"append":
            flags, value = found[0], found[1] + value
        case b"prepend":
            flags, value = found[0], value + found[1]
    put(key, flags, value)
    return b"STORED\r\n"


def count(key, change):
    if not (found := find(key)):
        return b"NOT_FOUND\r\n"
    value = max(int(found[1]) + change, 0)
    put(key, found[0], b"%d" % value)
    return b"%d\r\n" % value


def answer(line, payload):
    match line.split():
        case b"get", *keys:
            return values(keys, False)
        case b"gets", *keys:
            return values(keys, True)
        case (b"set" | b"add" | b"replace" | b"append" | b"prepend" | b"cas") as verb, key, flags, _, size, *rest:
            version = int(rest[0]) if verb == b"cas" else None
            assert payload[int(size) :] == b"\r\n"
            return save(verb, key, int(flags), payload[:-2], version)
        case b"delete", key, *_:
            return b"DELETED\r\n" if store.execute("DELETE FROM items WHERE key = ?", (key,)).rowcount else b"NOT_FOUND\r\n"
        case b"incr", key, change, *_:
            return count(key, int(change))
        case b"decr", key, change, *_:
            return count(key, -int(change))
        case b"flush_all", *_:
            store.execute("DELETE FROM items")
            return b"OK\r\n"
        case (b"version",):
            return b"VERSION 1.6.0\r\n"
    return b"ERROR\r\n"


with Worker() as worker:
    for message in worker:
        line, payload = message.bytes.split(b"\r\n", 1)
        if line == b"quit":
            message.close()
            continue
        store.execute("BEGIN IMMEDIATE")
        text = answer(line, payload)
        store.execute("COMMIT")
        if not line.endswith(b" noreply"):
            message.reply(text)
