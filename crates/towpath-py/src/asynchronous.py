"""Coroutines of the module towpath: waiting by the running asyncio event loop."""

import asyncio
import os


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


async def following(worker):
    """The next message or event of `async for`."""
    event = await receive(worker, worker._take)
    if event is None:
        raise StopAsyncIteration
    return event


async def send(sender, data, id):
    """Queues a buffer and passes it to the kernel."""
    sender.queue(data, id)
    while True:
        try:
            return sender.flush(0)
        except TimeoutError:
            await ready(sender.fileno(), write=True)
