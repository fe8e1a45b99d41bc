"""A NATS server: it greets with INFO, and delivers messages to the subscriptions of all connections."""

import json

from towpath import Ended, Opened, Worker

INFO = {"server_id": "towpath", "version": "2.10.0", "proto": 1, "headers": True, "max_payload": 1 << 20}
NO_RESPONDERS = b"NATS/1.0 503\r\n\r\n"


class Subscription:
    def __init__(self, subject, group):
        self.pattern, self.group, self.left = subject.split(b"."), group, None

    def matches(self, subject):
        words = subject.split(b".")
        if self.pattern[-1] == b">":
            return len(words) >= len(self.pattern) and self.fits(words[: len(self.pattern) - 1], self.pattern[:-1])
        return len(words) == len(self.pattern) and self.fits(words, self.pattern)

    @staticmethod
    def fits(words, pattern):
        return all(wanted in (b"*", word) for word, wanted in zip(words, pattern))


class Server:
    def __init__(self, worker):
        self.worker, self.open, self.turn = worker, {}, 0

    def receivers(self, subject):
        """Every subscription outside of groups, and one of each queue group."""
        groups = {}
        for connection, subscriptions in self.open.items():
            for sid, subscription in subscriptions.items():
                if subscription.matches(subject):
                    group = subscription.group or (connection, sid)
                    groups.setdefault(group, []).append((connection, sid))
        self.turn += 1
        return [members[self.turn % len(members)] for members in groups.values()]

    def publish(self, publisher, subject, reply, head, body):
        """Returns the number of receivers."""
        receivers = self.receivers(subject)
        if not receivers and reply:
            receivers = [at for at in self.receivers(reply) if at[0] == publisher]
            subject, reply, head, body = reply, b"", NO_RESPONDERS, b""
        for connection, sid in receivers:
            words = [b"HMSG" if head else b"MSG", subject, sid] + ([reply] if reply else [])
            words += ([b"%d" % len(head)] if head else []) + [b"%d" % len(head + body)]
            self.worker.send(b" ".join(words) + b"\r\n" + head + body + b"\r\n", connection)
            subscription = self.open[connection][sid]
            if subscription.left is not None:
                subscription.left -= 1
                if subscription.left == 0:
                    del self.open[connection][sid]

    def handle(self, message):
        line, payload = message.bytes.split(b"\r\n", 1)
        subscriptions = self.open[message.connection]
        match line.split():
            case b"CONNECT", *text:
                assert json.loads(b" ".join(text))["lang"] == "python3"
            case (b"PING",):
                message.reply(b"PONG\r\n")
            case b"SUB", subject, *group, sid:
                subscriptions[sid] = Subscription(subject, group[0] if group else None)
            case b"UNSUB", sid:
                subscriptions.pop(sid, None)
            case b"UNSUB", sid, left:
                subscriptions[sid].left = int(left)
            case b"PUB", subject, *reply, size:
                assert payload[int(size) :] == b"\r\n"
                self.publish(message.connection, subject, reply[0] if reply else b"", b"", payload[:-2])
            case b"HPUB", subject, *reply, head, size:
                head, body = payload[: int(head)], payload[int(head) : int(size)]
                self.publish(message.connection, subject, reply[0] if reply else b"", head, body)
            case _:
                message.reply(b"-ERR 'Unknown Protocol Operation'\r\n", close=True)


with Worker(events=True) as worker:
    server = Server(worker)
    for event in worker:
        match event:
            case Opened():
                server.open[event.connection] = {}
                event.reply(b"INFO " + json.dumps(INFO).encode() + b" \r\n")
            case Ended():
                del server.open[event.connection]
            case _:
                server.handle(event)
