"""nats-py: subscriptions with wildcards and groups, headers, request and reply, a limited subscription, drain."""

import asyncio
import sys

import nats
from nats.errors import NoRespondersError

COUNT = 1000


async def wildcards(one, two):
    """A second connection gets every message of its pattern, in order."""
    some, all_of_them = await two.subscribe("words.*.a"), await two.subscribe("words.>")
    await two.flush()
    for number in range(COUNT):
        await one.publish(f"words.{number}.{'ab'[number % 2]}", b"%d" % number)
    for number in range(COUNT):
        message = await all_of_them.next_msg(timeout=30)
        assert (message.subject, message.data) == (f"words.{number}.{'ab'[number % 2]}", b"%d" % number), message
    for number in range(0, COUNT, 2):
        assert (await some.next_msg(timeout=30)).data == b"%d" % number
    await some.unsubscribe()
    await one.publish("words.last.a", b"last")
    assert (await all_of_them.next_msg(timeout=30)).data == b"last"
    assert some.pending_msgs == 0


async def payloads(one, two):
    """Payloads with line ends, none, and long ones; headers."""
    subscription = await two.subscribe("data")
    await two.flush()
    rows = [b"", b"\r\n", b"PUB data 3\r\nabc\r\n", bytes(range(256)) * 3000]
    for row in rows:
        await one.publish("data", row)
        await one.publish("data", row, headers={"Length": str(len(row)), "Name": "value"})
    for row in rows:
        plain, headed = [await subscription.next_msg(timeout=30) for _ in range(2)]
        assert plain.data == row and plain.headers is None
        assert headed.data == row and headed.headers == {"Length": str(len(row)), "Name": "value"}, headed.headers


async def requests(one, two):
    async def answer(message):
        await message.respond(message.data.upper())

    await two.subscribe("capitals", cb=answer)
    await two.flush()
    answers = await asyncio.gather(*(one.request("capitals", b"word %d" % n, timeout=30) for n in range(100)))
    assert [answer.data for answer in answers] == [b"WORD %d" % n for n in range(100)]
    try:
        await one.request("nothing", b"", timeout=30)
    except NoRespondersError:
        return
    raise AssertionError("there is no responder")


async def groups(one, two):
    """Each message goes to one member of a group. A subscription with a limit ends at it."""
    members = [await client.subscribe("work", queue="workers") for client in (one, two)]
    limited = await two.subscribe("work")
    await limited.unsubscribe(limit=3)
    await one.flush()
    await two.flush()
    for number in range(10):
        await one.publish("work", b"%d" % number)
    await one.flush()
    await two.flush()
    shares = [[await member.next_msg(timeout=30) for _ in range(5)] for member in members]
    assert sorted(int(message.data) for share in shares for message in share) == list(range(10))
    assert [(await limited.next_msg(timeout=30)).data for _ in range(3)] == [b"0", b"1", b"2"]


async def main(port):
    async def error(problem):
        raise problem

    one, two = [await nats.connect(f"nats://127.0.0.1:{port}", error_cb=error, allow_reconnect=False) for _ in range(2)]
    assert one.connected_server_version.major == 2
    for part in (wildcards, payloads, requests, groups):
        await part(one, two)
    for client in (one, two):
        await client.drain()
        assert client.last_error is None, client.last_error
    print("ok")


asyncio.run(main(sys.argv[1]))
