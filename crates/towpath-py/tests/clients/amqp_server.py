"""An AMQP 0-9-1 broker: channels, queues, basic.publish, get, consume, ack, and confirms. One worker has all queues."""

import struct
from collections import deque

from towpath import Ended, Message, Opened, Worker

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
FRAME_MAX = 4096
END = b"\xce"


def frame(kind, channel, payload):
    return struct.pack("!BHI", kind, channel, len(payload)) + payload + END


def method(channel, number, arguments=b""):
    return frame(METHOD, channel, struct.pack("!HH", *number) + arguments)


def short(text):
    return bytes([len(text)]) + text


def take(data):
    """A short string, and the rest."""
    return data[1 : 1 + data[0]], data[1 + data[0] :]


def long(text):
    return struct.pack("!I", len(text)) + text


class Channel:
    def __init__(self):
        self.publishing, self.head, self.body, self.confirms, self.published = None, b"", b"", False, 0
        self.delivered, self.tag = {}, 0


class Broker:
    def __init__(self, worker):
        self.worker, self.channels, self.queues, self.consumers = worker, {}, {}, {}

    def content(self, number, head, body):
        """The frames of a message's properties and body."""
        frames = [frame(HEADER, number, head)]
        step = FRAME_MAX - 8
        return b"".join(frames + [frame(BODY, number, body[at : at + step]) for at in range(0, len(body), step)])

    def publish(self, event, number, channel):
        queue, head, body = channel.publishing, channel.head, channel.body
        channel.publishing = None
        answer = b""
        if channel.confirms:
            channel.published += 1
            answer = method(number, (60, 80), struct.pack("!QB", channel.published, 0))
        if queue in self.consumers:
            self.deliver(queue, head, body)
        else:
            self.queues[queue].append((head, body))
        return answer

    def deliver(self, queue, head, body):
        connection, number, tag = self.consumers[queue]
        channel = self.channels[connection][number]
        channel.tag += 1
        channel.delivered[channel.tag] = (queue, head, body)
        arguments = short(tag) + struct.pack("!QB", channel.tag, 0) + short(b"") + short(queue)
        self.worker.send(method(number, (60, 60), arguments) + self.content(number, head, body), connection)

    def call(self, event, number, name, arguments):
        channels = self.channels[event.connection]
        match name:
            case (10, 11):  # start-ok
                return method(0, (10, 30), struct.pack("!HIH", 16, FRAME_MAX, 0))
            case (10, 31):  # tune-ok
                return b""
            case (10, 40):  # open
                return method(0, (10, 41), short(b""))
            case (10, 50):  # close
                return method(0, (10, 51))
            case (20, 10):  # channel.open
                channels[number] = Channel()
                return method(number, (20, 11), long(b""))
            case (20, 40):  # channel.close
                del channels[number]
                self.consumers = {queue: at for queue, at in self.consumers.items() if at[:2] != (event.connection, number)}
                return method(number, (20, 41))
        channel = channels[number]
        match name:
            case (50, 10):  # queue.declare
                queue, _ = take(arguments[2:])
                self.queues.setdefault(queue, deque())
                return method(number, (50, 11), short(queue) + struct.pack("!II", len(self.queues[queue]), 0))
            case (85, 10):  # confirm.select
                channel.confirms = True
                return method(number, (85, 11))
            case (60, 40):  # basic.publish
                _, rest = take(arguments[2:])
                channel.publishing, channel.head, channel.body = take(rest)[0], b"", b""
                return b""
            case (60, 70):  # basic.get
                queue = self.queues[take(arguments[2:])[0]]
                if not queue:
                    return method(number, (60, 72), short(b""))
                head, body = queue.popleft()
                channel.tag += 1
                found = struct.pack("!QB", channel.tag, 0) + short(b"") + short(b"queue") + struct.pack("!I", len(queue))
                return method(number, (60, 71), found) + self.content(number, head, body)
            case (60, 20):  # basic.consume
                queue, rest = take(arguments[2:])
                tag, _ = take(rest)
                self.consumers[queue] = (event.connection, number, tag)
                event.reply(method(number, (60, 21), short(tag)))
                while self.queues[queue]:
                    self.deliver(queue, *self.queues[queue].popleft())
                return None
            case (60, 30):  # basic.cancel
                tag, _ = take(arguments)
                self.consumers = {queue: at for queue, at in self.consumers.items() if at[2] != tag}
                return method(number, (60, 31), short(tag))
            case (60, 80):  # basic.ack
                (tag, several) = struct.unpack("!QB", arguments)
                for one in [one for one in channel.delivered if one == tag or several and one < tag]:
                    del channel.delivered[one]
                return b""
            case (60, 10):  # basic.qos
                return method(number, (60, 11))
        raise ValueError(name)

    def handle(self, event):
        if event.bytes.startswith(b"AMQP"):
            assert event.bytes == b"AMQP\0\0\x09\x01"
            # pika asks for both before it uses confirms.
            flags = [short(name) + b"t\1" for name in (b"publisher_confirms", b"basic.nack")]
            capabilities = short(b"capabilities") + b"F" + long(b"".join(flags))
            start = b"\0\x09" + long(capabilities) + long(b"PLAIN") + long(b"en_US")
            return method(0, (10, 10), start)
        kind, number, size = struct.unpack_from("!BHI", event.bytes)
        payload = event.bytes[7:-1]
        assert len(payload) == size and event.bytes[-1:] == END
        if kind == METHOD:
            return self.call(event, number, struct.unpack_from("!HH", payload), payload[4:])
        if kind == HEARTBEAT:
            return b""
        channel = self.channels[event.connection][number]
        if kind == HEADER:
            channel.head = payload
        else:
            channel.body += payload
        (whole,) = struct.unpack_from("!Q", channel.head, 4)
        return self.publish(event, number, channel) if len(channel.body) == whole else b""


with Worker(events=True) as worker:
    broker = Broker(worker)
    for event in worker:
        match event:
            case Opened():
                broker.channels[event.connection] = {}
            case Ended():
                del broker.channels[event.connection]
                broker.consumers = {queue: at for queue, at in broker.consumers.items() if at[0] != event.connection}
            case Message() if text := broker.handle(event):
                event.reply(text)
