"""websockets: text, binary, fragments, pings, and closes of both sides, on several connections at once."""

import asyncio
import sys

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed


async def echo(socket, name):
    rows = ["", f"text {name} \u00e9", b"", bytes(range(256)), b"x" * 125, b"x" * 126, b"x" * 65535, b"x" * 65536]
    rows.append(bytes(range(256)) * 4096)
    for row in rows:
        await socket.send(row)
    # They are answered in their order.
    for row in rows:
        assert await socket.recv() == row, row[:80]
    await socket.send(["three ", "", "parts"])
    assert await socket.recv() == "three parts"
    await (await socket.ping(b"a ping"))
    for number in range(300):
        await socket.send(f"{name} {number}")
    for number in range(300):
        assert await socket.recv() == f"{name} {number}"


async def client_closes(url, name):
    async with connect(url, max_size=None) as socket:
        await echo(socket, name)
        await socket.close(4000 + name, "a reason")
        assert (socket.close_code, socket.protocol.close_rcvd.code) == (4000 + name, 4000 + name)
        assert not socket.protocol.close_rcvd_then_sent


async def server_closes(url, name):
    async with connect(url, max_size=None) as socket:
        await echo(socket, name)
        await socket.send(f"close {4100 + name} enough")
        await socket.send("after the close")
        try:
            await socket.recv()
        except ConnectionClosed as closed:
            assert (closed.rcvd.code, closed.rcvd.reason) == (4100 + name, "enough")
            assert closed.rcvd_then_sent
            return
        raise AssertionError("the server closes")


async def main(port):
    url = f"ws://127.0.0.1:{port}/"
    await asyncio.gather(*(closes(url, name) for name in range(8) for closes in (client_closes, server_closes)))
    print("ok")


asyncio.run(main(sys.argv[1]))
