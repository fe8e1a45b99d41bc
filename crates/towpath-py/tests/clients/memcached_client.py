"""pymemcache: storage commands, values with line ends, many keys, counters and check-and-set, without and with `noreply`."""

import concurrent.futures
import sys

from pymemcache.client.base import Client


def storage(client):
    for value in (b"", b"\r\n", b"END\r\nget b\r\n", bytes(range(256)) * 2000):
        assert client.set("key", value) and client.get("key") == value
    assert not client.add("key", b"x") and client.replace("key", b"middle")
    assert client.append("key", b" end") and client.prepend("key", b"start ")
    assert client.get("key") == b"start middle end"
    assert not client.replace("none", b"x") and client.get("none") is None
    _, version = client.gets("key")
    assert client.cas("key", b"new", version) is True and client.cas("key", b"newer", version) is False
    assert client.cas("none", b"x", version) is None
    assert client.delete("key") and not client.delete("key")


def many(client):
    rows = {f"many-{number}": b"%d\r\n" % number for number in range(200)}
    assert client.set_many(rows) == []
    assert client.get_many(list(rows)) == rows
    assert client.delete_many(list(rows)) and client.get_many(list(rows)) == {}


def without_replies(client):
    """Commands without an answer, then one with: the answers are not mixed up."""
    for number in range(200):
        client.set(f"quiet-{number}", b"%d" % number, noreply=True)
    client.delete("quiet-7", noreply=True)
    wanted = {f"quiet-{number}": b"%d" % number for number in range(200) if number != 7}
    assert client.get_many([f"quiet-{number}" for number in range(200)]) == wanted
    assert client.version() == b"1.6.0"


def count(port):
    client = Client(("127.0.0.1", port), default_noreply=False, timeout=60)
    for _ in range(100):
        client.incr("count", 2)
        client.decr("count", 1)
    client.quit()


port = int(sys.argv[1])
client = Client(("127.0.0.1", port), default_noreply=False, timeout=60)
for part in (storage, many, without_replies):
    part(client)
assert client.set("count", b"0") and client.incr("none", 1) is None
with concurrent.futures.ThreadPoolExecutor() as threads:
    list(threads.map(count, [port] * 4))
assert client.get("count") == b"400"
client.quit()
print("ok")
