"""An MQTT 3.1.1 broker: subscriptions, retained state, and wills, which are published when a connection ends without DISCONNECT."""

import struct
from enum import IntEnum

from towpath import Ended, Opened, Worker

RETAIN = 1


class Kind(IntEnum):
    """Section 2.2.1."""

    CONNECT, CONNACK, PUBLISH, PUBACK, SUBSCRIBE, SUBACK = 1, 2, 3, 4, 8, 9
    UNSUBSCRIBE, UNSUBACK, PINGREQ, PINGRESP, DISCONNECT = 10, 11, 12, 13, 14


class Client:
    def __init__(self):
        self.will, self.filters, self.number = None, {}, 0


def packet(kind, flags, body):
    length, size = bytearray(), len(body)
    while True:
        size, low = size >> 7, size & 0x7F
        length.append(low | (0x80 if size else 0))
        if not size:
            return bytes([kind << 4 | flags]) + bytes(length) + body


def body_of(message):
    at = 1
    while message[at] & 0x80:
        at += 1
    return message[at + 1 :]


def take(body):
    """A field with two bytes of length, and the rest."""
    (size,) = struct.unpack_from("!H", body)
    return body[2 : 2 + size], body[2 + size :]


def matches(pattern, topic):
    pattern, words = pattern.split(b"/"), topic.split(b"/")
    if pattern[-1] == b"#":
        pattern, words = pattern[:-1], words[: len(pattern) - 1]
    return len(pattern) == len(words) and all(wanted in (b"+", word) for wanted, word in zip(pattern, words))


class Broker:
    def __init__(self, worker):
        self.worker, self.clients, self.retained = worker, {}, {b"room/state": b"ready"}

    def deliver(self, connection, topic, payload, qos, flags=0):
        client = self.clients[connection]
        number = b""
        if qos:
            client.number = client.number % 0xFFFF + 1
            number = struct.pack("!H", client.number)
        body = struct.pack("!H", len(topic)) + topic + number + payload
        self.worker.send(packet(Kind.PUBLISH, qos << 1 | flags, body), connection)

    def publish(self, topic, payload, qos):
        for connection, client in self.clients.items():
            granted = [most for pattern, most in client.filters.items() if matches(pattern, topic)]
            if granted:
                self.deliver(connection, topic, payload, min(qos, max(granted)))

    def connect(self, message, client, body):
        name, rest = take(body)
        assert name == b"MQTT" and rest[0] == 4, "version 3.1.1"
        flags, (_, rest) = rest[1], take(rest[4:])
        if flags & 0x04:
            topic, rest = take(rest)
            payload, rest = take(rest)
            client.will = (topic, payload, flags >> 3 & 3)
        message.reply(packet(Kind.CONNACK, 0, bytes(2)))

    def subscribe(self, message, client, body):
        number, body, granted = body[:2], body[2:], bytearray()
        while body:
            pattern, body = take(body)
            client.filters[pattern] = min(body[0], 1)
            granted.append(min(body[0], 1))
            body = body[1:]
        message.reply(packet(Kind.SUBACK, 0, number + granted))
        for topic, payload in self.retained.items():
            if any(matches(pattern, topic) for pattern in client.filters):
                self.deliver(message.connection, topic, payload, 0, RETAIN)

    def handle(self, message):
        client, kind, flags = self.clients[message.connection], message.bytes[0] >> 4, message.bytes[0] & 15
        body = body_of(message.bytes)
        match kind:
            case Kind.CONNECT:
                self.connect(message, client, body)
            case Kind.PUBLISH:
                topic, rest = take(body)
                qos = flags >> 1 & 3
                assert qos < 2
                if qos:
                    message.reply(packet(Kind.PUBACK, 0, rest[:2]))
                    rest = rest[2:]
                self.publish(topic, rest, qos)
            case Kind.SUBSCRIBE:
                self.subscribe(message, client, body)
            case Kind.UNSUBSCRIBE:
                client.filters.pop(take(body[2:])[0], None)
                message.reply(packet(Kind.UNSUBACK, 0, body[:2]))
            case Kind.PINGREQ:
                message.reply(packet(Kind.PINGRESP, 0, b""))
            case Kind.DISCONNECT:
                client.will = None
                message.close()


with Worker(events=True) as worker:
    broker = Broker(worker)
    for event in worker:
        match event:
            case Opened():
                broker.clients[event.connection] = Client()
            case Ended():
                client = broker.clients.pop(event.connection)
                if client.will:
                    broker.publish(*client.will)
            case _:
                broker.handle(event)
