"""A Kafka broker with one topic of two partitions. It keeps the record batches that producers send, with their offsets.

Versions: ApiVersions 0, Metadata 1, Produce 3, Fetch 4, ListOffsets 1.
"""

import struct

from towpath import Message, Opened, Worker

PRODUCE, FETCH, LIST_OFFSETS, METADATA, API_VERSIONS = 0, 1, 2, 3, 18
VERSIONS = {PRODUCE: 3, FETCH: 4, LIST_OFFSETS: 1, METADATA: 1, API_VERSIONS: 0}
NO_ERROR, OFFSET_OUT_OF_RANGE, UNKNOWN_PARTITION, UNSUPPORTED_VERSION = 0, 1, 3, 35
LATEST = -1


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, form):
        values = struct.unpack_from("!" + form, self.data, self.at)
        self.at += struct.calcsize("!" + form)
        return values if len(values) > 1 else values[0]

    def bytes(self, form="i"):
        size = self.take(form)
        if size < 0:
            return None
        self.at += size
        return self.data[self.at - size : self.at]

    def string(self):
        return self.bytes("h")

    def array(self, item):
        """The items; `None` for the array of length -1."""
        size = self.take("i")
        return None if size < 0 else [item() for _ in range(size)]


def string(text):
    return struct.pack("!h", len(text)) + text


def array(items):
    items = list(items)
    return struct.pack("!i", len(items)) + b"".join(items)


class Log:
    """The batches of a partition. The first field of a batch is the offset of its first record, which the broker sets."""

    def __init__(self):
        self.batches, self.end = [], 0

    def append(self, data):
        first, at = self.end, 0
        while at < len(data):
            size, (last,) = 12 + struct.unpack_from("!i", data, at + 8)[0], struct.unpack_from("!i", data, at + 23)
            assert data[at + 16] == 2, "batches of format 2"
            self.batches.append((self.end + last, struct.pack("!q", self.end) + data[at + 8 : at + size]))
            self.end, at = self.end + last + 1, at + size
        return first

    def read(self, offset, most):
        """Batches from the one with `offset` on; at least one."""
        data = b""
        for last, batch in self.batches:
            if last >= offset and (not data or len(data) + len(batch) <= most):
                data += batch
            elif data:
                break
        return data


class Broker:
    def __init__(self):
        self.port, self.topics = None, {b"words": [Log(), Log()]}

    def log(self, topic, partition):
        logs = self.topics.get(topic, [])
        return logs[partition] if 0 <= partition < len(logs) else None

    def versions(self, version):
        error = UNSUPPORTED_VERSION if version else NO_ERROR
        return struct.pack("!h", error) + array(struct.pack("!hhh", key, most, most) for key, most in VERSIONS.items())

    def metadata(self, reader):
        names = reader.array(reader.string)
        broker = struct.pack("!i", 1) + string(b"127.0.0.1") + struct.pack("!ih", self.port, -1)
        topics = []
        for name in self.topics if names is None else names:
            logs = self.topics.get(name, [])
            partitions = array(
                struct.pack("!hii", NO_ERROR, number, 1) + 2 * array([struct.pack("!i", 1)]) for number in range(len(logs))
            )
            error = NO_ERROR if logs else UNKNOWN_PARTITION
            topics.append(struct.pack("!h", error) + string(name) + b"\0" + partitions)
        return array([broker]) + struct.pack("!i", 1) + array(topics)

    def produce(self, reader):
        """The answer, or none for a producer that wants no acknowledgements."""
        reader.string()
        acks, _ = reader.take("hi")

        def partition(topic):
            number, data = reader.take("i"), reader.bytes()
            log = self.log(topic, number)
            first, error = (log.append(data), NO_ERROR) if log else (-1, UNKNOWN_PARTITION)
            return struct.pack("!ihqq", number, error, first, -1)

        topics = array(reader.array(lambda: self.of_topic(reader, partition)))
        return topics + struct.pack("!i", 0) if acks else None

    def fetch(self, reader):
        reader.take("iiiib")

        def partition(topic):
            number, offset, most = reader.take("iqi")
            log = self.log(topic, number)
            error = UNKNOWN_PARTITION if not log else NO_ERROR if 0 <= offset <= log.end else OFFSET_OUT_OF_RANGE
            data = log.read(offset, most) if error == NO_ERROR else b""
            end = log.end if log else -1
            return struct.pack("!ihqqii", number, error, end, end, 0, len(data)) + data

        return struct.pack("!i", 0) + array(reader.array(lambda: self.of_topic(reader, partition)))

    def offsets(self, reader):
        reader.take("i")

        def partition(topic):
            number, time = reader.take("iq")
            log = self.log(topic, number)
            offset, error = ((log.end if time == LATEST else 0), NO_ERROR) if log else (-1, UNKNOWN_PARTITION)
            return struct.pack("!ihqq", number, error, -1, offset)

        return array(reader.array(lambda: self.of_topic(reader, partition)))

    @staticmethod
    def of_topic(reader, partition):
        name = reader.string()
        return string(name) + array(reader.array(lambda: partition(name)))

    def answer(self, request):
        reader = Reader(request)
        _, key, version, correlation = reader.take("ihhi")
        if key == API_VERSIONS:
            body = self.versions(version)
        else:
            assert VERSIONS[key] == version, (key, version)
            reader.string()
            calls = {PRODUCE: self.produce, FETCH: self.fetch, LIST_OFFSETS: self.offsets, METADATA: self.metadata}
            body = calls[key](reader)
        return None if body is None else struct.pack("!ii", 4 + len(body), correlation) + body


with Worker(events=True) as worker:
    broker = Broker()
    for event in worker:
        match event:
            case Opened():
                broker.port = int(event.listener.rsplit(":", 1)[1])
            case Message() if text := broker.answer(event.bytes):
                event.reply(text)
