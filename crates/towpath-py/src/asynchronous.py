"""Coroutines of the module towpath: waiting by the running asyncio event loop."""

import asyncio
import os
import socket


async def ready(fd, write=False):
    """Waits until the descriptor is readable, or writable."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    # A duplicate: the loop may watch the descriptor for the program, too.
    fd = os.dup(fd)
    add, remove = (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
    try:
        add(fd, lambda: future.done() or future.set_result(None))
        await future
    finally:
        remove(fd)
        os.close(fd)


async def receive(worker, take):
    """What `take` finds: the next message or event of a worker; None when the mux releases it."""
    while True:
        try:
            return take()
        except TimeoutError:
            worker.flush()
        try:
            if worker.arm():
                await ready(worker.fileno())
        finally:
            worker.disarm()


async def following(waiting):
    """What a coroutine returns, for `async for`; None is the end."""
    event = await waiting
    if event is None:
        raise StopAsyncIteration
    return event


async def mux_receive(mux, max, flags):
    """Mux.recv: the next message; None when the multiplexor has drained."""
    while True:
        try:
            return mux.recv(max, flags | socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        try:
            if mux.arm():
                await ready(mux.fileno())
        finally:
            mux.disarm()


async def mux_send(mux, data, to, flags):
    """Mux.send: sends a message, or a part of one, when there is room."""
    while True:
        try:
            return mux.send(data, to, flags | socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        # A handle of its own: another task may wait for a message with this one.
        waiter = mux.clone()
        try:
            waiter.set_receive(False)
            connection = getattr(to, "connection", to)
            if waiter.arm(connection, room=connection is None):
                await ready(waiter.fileno())
            waiter.disarm()
        finally:
            waiter.close(0)


async def send(sender, data, id):
    """Queues a buffer and passes it to the kernel."""
    sender.queue(data, id)
    while True:
        try:
            return sender.flush(0)
        except TimeoutError:
            await ready(sender.fileno(), write=True)
