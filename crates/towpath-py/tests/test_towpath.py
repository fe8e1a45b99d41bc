"""Tests of the module towpath. tests/python.rs runs them with the module in PYTHONPATH and the towpath binary in TOWPATH."""

import array
import ast
import asyncio
import errno
import gc
import http.client
import inspect
import json
import os
import pathlib
import random
import select
import shutil
import signal
import smtplib
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import zlib

import towpath
from towpath import Inspector, Mux, Sender, Verdict, Worker

HERE = pathlib.Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
OFFICE = HERE.parent.parent.parent / "examples"
COMMAND = os.environ["TOWPATH"]


def one_by_one(queue):
    odd = 0
    for frame in queue:
        assert frame.kind == towpath.PACKET and frame.queue == 1 and frame.gap is None
        assert frame.wire_len >= len(frame.payload) > frame.network >= 14 and frame.link_type == 1
        assert frame.sender == (0, 0, 0) and frame.time > 0 and frame.data > frame.network
        odd += 1
        if odd % 2:
            frame.verdict(Verdict.DROP)
        else:
            frame.verdict(Verdict.PASS, mark=5, mask=7)
        refuses(ValueError, "decided before", frame.verdict, Verdict.PASS)
    assert queue.recv() is None and queue.recv_batch() == []


def many(queue):
    while batch := queue.recv_batch(32, timeout=60):
        assert len(batch) <= 32
        batch[0].verdict(Verdict.DROP)
        if len(batch) % 2:
            queue.verdict_upto(batch[-1], Verdict.PASS)
        else:
            queue.verdict_all(Verdict.PASS)


def held(queue):
    while batch := queue.recv_batch(16):
        for frame in batch:
            frame.verdict(Verdict.HOLD)
        for frame in reversed(batch):
            frame.verdict(Verdict.PASS, flow=True)


def capitals(queue):
    too_long = bytes(1 << 30)
    for number, frame in enumerate(queue):
        payload = frame.payload[: frame.data] + frame.payload[frame.data :].upper()
        refuses(OSError, "larger than the other side accepts", frame.replace, too_long)
        frame.replace([payload, bytearray(payload), memoryview(payload)][number % 3])


def loop(queue):
    while True:
        if queue.arm():
            select.select([queue], [], [])
        queue.disarm()
        try:
            while frame := queue.recv(0):
                frame.verdict(Verdict.PASS)
        except TimeoutError:
            queue.flush()
        else:
            return


def answer(message):
    assert message.bytes == message.payload + b"\n" and message.time > 0
    # A single reply: messages of other workers may be interleaved between two parts.
    message.reply(bytearray(b"a " + message.bytes))


def in_parts(worker):
    """Answers in parts. Nothing else is sent on the connection."""
    for message in worker:
        message.reply(b"a ", more=True)
        message.reply(bytearray(message.bytes))


def iterate(worker):
    for message in worker:
        answer(message)
        worker.send(b"sent\n", message.connection)
        assert message.connection == message.connection and message.connection.index >= 0
        hash(message.connection)


def mail(event, state):
    """An SMTP server's answer: the text, and whether the connection ends."""
    match event:
        case towpath.Opened():
            assert event.peer.startswith("127.0.0.1:") and event.listener == event.local and not event.tls
            assert event.server_name == "" and event.protocol == b"" and event.client_names == [] and event.time > 0
            state[event.connection] = False
            return b"220 ready", False
        case towpath.Ended():
            del state[event.connection]
            assert event.cause == "closed" and event.errno == 0 and event.text == "closed by a worker", event.text
            assert (event.bytes, event.length) == (0, None)
            return None, False
    line = event.payload.strip().upper()
    if state[event.connection]:
        state[event.connection] = line != b"."
        return (b"250 accepted" if line == b"." else None), False
    if line == b"DATA":
        state[event.connection] = True
        return b"354 go on", False
    return (b"221 bye", True) if line == b"QUIT" else (b"250 ok", False)


def smtp(worker):
    state = {}
    for event in worker:
        text, last = mail(event, state)
        if text:
            event.reply(text + b"\r\n", close=last)


def smtp_async(worker):
    async def serve():
        state, ticks = {}, 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        async for event in worker:
            text, last = mail(event, state)
            if text:
                event.reply(text + b"\r\n")
                if last:
                    event.close()
        assert await worker.arecv() is None
        ticking.cancel()
        # The loop ran other tasks meanwhile.
        assert ticks > 1

    asyncio.run(serve())


def names(worker):
    """Answers an opened event with what TLS says about the client."""
    for event in worker:
        if isinstance(event, towpath.Opened):
            event.reply(f"{event.tls} {event.starttls} {event.server_name} {event.protocol} {event.client_names}\r\n".encode())


class Upload:
    """Checks the parts of one message, and answers the first one with 100 and the last one with a checksum."""

    def __init__(self):
        self.parts = self.bytes = self.sum = 0

    def add(self, message):
        bytes = message.bytes
        assert message.payload == bytes and message.hash == 0
        if message.part <= 1:
            head, end, bytes = bytes.partition(b"\r\n\r\n")
            assert head.startswith(b"POST / HTTP/1.1\r\n") and end
            assert message.more is (message.part == 1) and message.cut is False
        else:
            assert message.part == self.parts + 1
            assert not message.more or 16 << 10 <= len(bytes) <= 256 << 10
        self.parts += 1
        self.bytes += len(bytes)
        self.sum = zlib.crc32(bytes, self.sum)
        if message.cut:
            assert message.bytes == b"" and message.more is False
            print(f"cut after {self.bytes} bytes", file=sys.stderr, flush=True)
        elif message.more and message.part == 1:
            message.reply(b"HTTP/1.1 100 Continue\r\n\r\n", more=True)
        elif not message.more:
            text = f"{self.bytes} {self.sum} {self.parts}"
            message.reply(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())


def uploads(worker):
    messages = {}
    for message in worker:
        messages.setdefault(message.connection, Upload()).add(message)
        if not message.more:
            del messages[message.connection]


def uploads_async(worker):
    async def serve():
        messages = {}
        async for message in worker:
            messages.setdefault(message.connection, Upload()).add(message)
            if not message.more:
                del messages[message.connection]

    asyncio.run(serve())


def resets(worker):
    while (event := worker.recv()) is not None:
        if isinstance(event, towpath.Ended):
            refuses(AttributeError, "done", getattr, event, "done")
            continue
        if not isinstance(event, towpath.Opened):
            worker.reset_connection(event.connection)
        event.done()
        refuses(ValueError, "done before", event.close)


def receive(worker):
    while message := worker.recv():
        answer(message)
        worker.send(b"sent\n", message.connection)
        message.done()
        refuses(ValueError, "done before", message.done)
        refuses(ValueError, "done before", message.reply, b"late\n")


def interrupted(worker):
    """Raises an exception in a signal handler during a wait, then serves like `iterate`."""

    class Rang(Exception):
        pass

    def ring(number, frame):
        raise Rang

    def wait():
        # Inside the call: on a busy machine the alarm may fire before the wait begins.
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        worker.recv()

    signal.signal(signal.SIGALRM, ring)
    # No client sends before this line is printed: an exception between recv and the reply would lose a message.
    refuses(Rang, "", wait)
    print("interrupted", file=sys.stderr, flush=True)
    iterate(worker)


def full(worker):
    """Raises an exception in a signal handler while send waits for room (the mux is stopped), then serves like `iterate`."""

    class Rang(Exception):
        pass

    def ring(number, frame):
        raise Rang

    def fill():
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        while True:
            # An empty payload produces no message.
            worker.send(b"", message.connection)

    signal.signal(signal.SIGALRM, ring)
    message = worker.recv()
    if message is None:
        return
    with socket.socket(fileno=os.dup(worker.fileno())) as ours:
        mux, _, _ = struct.unpack("3i", ours.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    os.kill(mux, signal.SIGSTOP)
    try:
        refuses(Rang, "", fill)
    finally:
        os.kill(mux, signal.SIGCONT)
    answer(message)
    worker.send(b"sent\n", message.connection)
    message.done()
    iterate(worker)


def refuses(kind, text, use, *arguments):
    try:
        use(*arguments)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"{use} did not refuse")


def checked(worker):
    """Checks that other threads run during a wait, serves like `iterate`, then closes the worker."""
    got, refused = [], 0

    def wait():
        try:
            got.append(worker.recv(0.1))
        except TimeoutError:
            pass

    # On a busy machine the wait may end before the other thread runs.
    while not (refused or got):
        waiting = threading.Thread(target=wait)
        waiting.start()
        while waiting.is_alive():
            try:
                worker.flush()
            except RuntimeError:
                refused += 1
        waiting.join()
    for message in filter(None, got):
        answer(message)
        worker.send(b"sent\n", message.connection)
        message.done()
    for wrong in (-1.0, float("nan")):
        refuses(ValueError, "not negative", worker.recv, wrong)
    iterate(worker)
    worker.close()
    worker.close()
    for use in (worker.recv, worker.fileno, worker.flush, lambda: worker.send(b""), lambda: next(worker)):
        refuses(ValueError, "the worker is closed", use)


def pinned():
    """Checks, in a separate network namespace with delayed packets, that a reset leaves packets in flight pinned."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    slow = "tc qdisc add dev lo root tbf rate 100bit burst 66000 limit 100mb".split()
    if subprocess.run(slow, stdout=subprocess.DEVNULL).returncode != 0:
        print("no tbf: buffers pinned after a reset are not tested")
    else:
        pinned_by(ours, peer)
    ours.close()
    peer.close()


def pinned_by(ours, peer):
    with Sender(ours, choice="zerocopy") as sender:
        data, unsent = bytearray(1 << 20), bytearray(b"unsent")
        sender.queue(data, "data")
        sender.queue(unsent, "unsent")
        assert not sender.close(0)
        assert (sender.pinned, sender.reclaim()) == (["data"], ["unsent"])
        unsent.append(0)
        refuses(BufferError, "", data.append, 0)
    del sender
    gc.collect()
    ours, peer = socket.socketpair()
    with ours, peer, Sender(ours):
        refuses(BufferError, "", data.append, 0)


def parts(name):
    """Runs this file as an inspector or worker: `test_towpath.py NAME`."""
    inspectors = {"one_by_one": one_by_one, "many": many, "held": held, "capitals": capitals, "loop": loop}
    workers = {"iterate": iterate, "receive": receive, "interrupted": interrupted, "full": full, "checked": checked, "in_parts": in_parts}
    workers["unsent"] = unsent
    events = {"smtp": smtp, "smtp_async": smtp_async, "resets": resets, "names": names}
    streams = {"uploads": uploads, "uploads_async": uploads_async}
    if name == "pinned":
        pinned()
    elif name in inspectors:
        with Inspector(name="test", gaps=False) as queue:
            inspectors[name](queue)
    elif name in streams:
        with Worker(name="test", parts=True) as worker:
            streams[name](worker)
    elif name in events:
        with Worker(name="test", events=True) as worker:
            events[name](worker)
    else:
        with Worker(name="test") as worker:
            workers[name](worker)
    # The mark file shows that this process finished.
    if mark := os.environ.get("TOWPATH_MARK"):
        pathlib.Path(mark).write_text(name)


class Module(unittest.TestCase):
    def test_stub_matches_module(self):
        stub = ast.parse((HERE.parent / "towpath.pyi").read_text())

        def names(body):
            for statement in body:
                match statement:
                    case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                        yield name
                    case ast.AnnAssign(target=ast.Name(id=name)):
                        yield name

        public = {name for name in vars(towpath) if not name.startswith("_")} | {"__version__"}
        self.assertEqual(set(names(stub.body)), public)
        for statement in stub.body:
            if isinstance(statement, ast.ClassDef):
                here = vars(getattr(towpath, statement.name))
                bases = [base.__name__ for base in getattr(towpath, statement.name).__bases__ if base is not object]
                self.assertEqual([base.id for base in statement.bases], bases, statement.name)
                self.signatures(statement)
                # Counters: the attributes of an object are its fields.
                public = {name for name in [*here, *here.get("_fields", ())] if not name.startswith("_")}
                stubbed = set(names(statement.body))
                self.assertEqual({name for name in stubbed if not name.startswith("_")}, public, statement.name)
                self.assertLessEqual(stubbed, {*here, *here.get("_fields", ())}, statement.name)
                self.assertTrue(here["__doc__"], statement.name)

    def signatures(self, stub):
        """Checks the parameters of a class: names, kinds and defaults. Special methods have none in the module."""
        described = getattr(towpath, stub.name)
        for function in stub.body:
            if not isinstance(function, ast.FunctionDef):
                continue
            name = f"{stub.name}.{function.name}"
            decorators = {decorator.id for decorator in function.decorator_list}
            if function.name == "__new__":
                found = inspect.signature(described)
            elif function.name.startswith("__") or "property" in decorators:
                continue
            else:
                found = inspect.signature(getattr(described, function.name))
            kinds = inspect.Parameter
            arguments = function.args
            stubbed = [(argument.arg, kinds.POSITIONAL_OR_KEYWORD) for argument in arguments.args]
            stubbed += [(argument.arg, kinds.KEYWORD_ONLY) for argument in arguments.kwonlyargs]
            absent = [None] * (len(arguments.args) - len(arguments.defaults))
            defaults = [
                kinds.empty if default is None else ast.literal_eval(default)
                for default in [*absent, *arguments.defaults, *arguments.kw_defaults]
            ]
            stubbed = [(*parameter, default) for parameter, default in zip(stubbed, defaults, strict=True)]
            here = [(each.name, each.kind, each.default) for each in found.parameters.values()]
            # The module shows some defaults as dots.
            here = [row[:2] + (stub[2],) if row[2] is ... else row for row, stub in zip(here, stubbed[-len(here) :])]
            # The methods of an object have self, its class and its class methods have no first parameter.
            if here[:1] and here[0][0] in ("self", "slf"):
                here = here[1:]
            self.assertEqual(stubbed[1:], here, name)

    def test_attach_errors(self):
        for attach in (Inspector, Worker):
            with self.assertRaisesRegex(OSError, "TOWPATH_SOCKET is not set"):
                attach()
            with self.assertRaisesRegex(FileNotFoundError, "/nonexistent/socket"):
                attach("/nonexistent/socket", name="me")
            with self.assertRaises(TypeError):
                attach(3)


def unsent(worker):
    """`keep` keeps the connection of the message, `send` sends to the kept one, `unsent` answers what came back."""
    kept = None
    assert worker.poll_unsent() is None
    for message in worker:
        text = b"none"
        match message.payload:
            case b"keep":
                kept, text = message.connection, b"kept"
            case b"send" if kept:
                worker.send(b"late", kept)
                text = b"sent"
            case b"unsent" if back := worker.poll_unsent():
                assert (back.connection, back.errno) == (kept, errno.EPIPE)
                text = b"unsent " + back.bytes
        message.reply(text + b"\n")


class Engine:
    """A towpath mux process whose workers run this file."""

    def __init__(self, part, example=None, order="replies", framing='delimiter="\\n" strip=delimiter', more=()):
        command = [sys.executable, "-B", example or __file__, *([part] if part else [])]
        self.process = subprocess.Popen(
            [COMMAND, "mux", "127.0.0.1:0", "--framing", framing, *(["--order", order] if order else [])]
            + ["--workers", "2", "--worker", " ".join(map(str, command)), *more],
            stderr=subprocess.PIPE,
            text=True,
        )
        line = self.process.stderr.readline()
        self.address = line.removeprefix("listening on ").strip()
        # The lines come in any order.
        awaited = [" attached"] + ["interrupted"] * (2 if part == "interrupted" else 0)
        while awaited:
            line = self.process.stderr.readline()
            if not line:
                raise AssertionError(f"it ended without: {awaited}")
            said = next((word for word in awaited if word in line), None)
            if said:
                awaited.remove(said)

    def connect(self):
        host, port = self.address.rsplit(":", 1)
        stream = socket.create_connection((host, int(port)), timeout=30)
        return stream, stream.makefile("rb")

    def finish(self):
        self.process.terminate()
        said = self.process.stderr.read()
        return self.process.wait(), said

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


class Messages(unittest.TestCase):
    def test_replies(self):
        for part in ("iterate", "receive", "interrupted", "full", "checked"):
            with self.subTest(part), Engine(part) as engine:
                stream, lines = engine.connect()
                with stream, lines:
                    for text in (b"hello", b"", b"x" * 100_000):
                        stream.sendall(text + b"\n")
                        self.assertEqual(sorted([lines.readline(), lines.readline()]), [b"a " + text + b"\n", b"sent\n"])
                    stream.sendall(b"".join(b"%d\n" % number for number in range(500)))
                    answers = [line for line in (lines.readline() for _ in range(1000)) if line != b"sent\n"]
                    self.assertEqual(answers, [b"a %d\n" % number for number in range(500)])
                code, said = engine.finish()
                self.assertEqual(code, 0, said)
                self.assertIn("503 messages: 503 done", said)

    def test_replies_in_parts(self):
        with Engine("in_parts") as engine:
            stream, lines = engine.connect()
            with stream, lines:
                stream.sendall(b"".join(b"%d\n" % number for number in range(100)))
                self.assertEqual([lines.readline() for _ in range(100)], [b"a %d\n" % number for number in range(100)])

    def test_unsent_messages(self):
        with Engine("unsent") as engine:
            stream, lines = engine.connect()
            with stream, lines:
                stream.sendall(b"keep\n")
                self.assertEqual(lines.readline(), b"kept\n")
            stream, lines = engine.connect()
            answers = set()
            with stream, lines:
                while b"unsent late\n" not in answers:
                    stream.sendall(b"send\nunsent\n")
                    answers |= {lines.readline(), lines.readline()}
            self.assertLessEqual(answers, {b"none\n", b"sent\n", b"unsent late\n"})

    def test_server_speaks_first(self):
        for part in ("smtp", "smtp_async"):
            with self.subTest(part), Engine(part, order="sticky") as engine:
                host, port = engine.address.rsplit(":", 1)
                for _ in range(3):
                    with smtplib.SMTP(host, int(port), timeout=30) as client:
                        self.assertEqual(client.noop()[0], 250)
                        self.assertEqual(client.sendmail("a@example", ["b@example"], "Subject: hello\n\nworld\n"), {})
                        self.assertEqual(client.quit(), (221, b"bye"))
                code, said = engine.finish()
                self.assertEqual(code, 0, said)
                self.assertNotIn("Error", said)

    @unittest.skipUnless(shutil.which("openssl"), "needs openssl")
    def test_names_of_tls(self):
        with tempfile.TemporaryDirectory() as directory:
            cert, key = f"{directory}/cert.pem", f"{directory}/key.pem"
            make = ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", "/CN=mux.example", "-keyout", key, "-out", cert]
            make += ["-addext", "subjectAltName=DNS:mux.example,URI:urn:7", "-addext", "basicConstraints=CA:FALSE"]
            subprocess.run(make, check=True, stderr=subprocess.DEVNULL)
            more = ["--tls", f"{cert},{key}", "--tls-client-ca", cert]
            context = ssl.create_default_context(cafile=cert)
            context.load_cert_chain(cert, key)
            for starttls, framing in ((False, "mqtt"), (True, "smtp")):
                options = [*more, "--starttls"] if starttls else more
                with self.subTest(framing), Engine("names", order=None, framing=framing, more=options) as engine:
                    context.set_alpn_protocols(["x", "mqtt"])
                    stream, lines = engine.connect()
                    if starttls:
                        self.assertTrue(lines.readline().startswith(b"220 "))
                        stream.sendall(b"STARTTLS\r\n")
                        self.assertTrue(lines.readline().startswith(b"220 "))
                    lines.close()
                    with context.wrap_socket(stream, server_hostname="mux.example") as client:
                        protocol = b"" if starttls else b"mqtt"
                        names = ["mux.example", "urn:7"]
                        expected = f"True {starttls} mux.example {protocol} {names}\r\n".encode()
                        self.assertEqual(client.recv(1000), expected)

    def test_connections_are_reset(self):
        with Engine("resets") as engine:
            stream, lines = engine.connect()
            with stream, lines:
                stream.sendall(b"hello\n")
                self.assertRaises(ConnectionResetError, stream.recv, 1)

    def test_example(self):
        with Engine(None, EXAMPLES / "worker.py") as engine:
            stream, lines = engine.connect()
            with stream, lines:
                stream.sendall(b"hello\n")
                self.assertEqual(lines.readline(), b"HELLO\n")


class MessagesInParts(unittest.TestCase):
    """Workers of a framing with body=stream."""

    def upload(self, stream, lines, head, rest):
        """Sends the head of an upload, and the rest when the worker has answered its first part."""
        stream.sendall(b"POST / HTTP/1.1\r\nHost: a\r\n" + head + b"\r\n\r\n")
        self.assertEqual(lines.readline() + lines.readline(), b"HTTP/1.1 100 Continue\r\n\r\n")
        stream.sendall(rest)
        self.assertEqual(lines.readline(), b"HTTP/1.1 200 OK\r\n")
        length = int(lines.readline().removeprefix(b"Content-Length: "))
        self.assertEqual(lines.readline(), b"\r\n")
        return tuple(map(int, lines.read(length).split()))

    def test_uploads_of_8_mib(self):
        body = random.Random(1).randbytes(8 << 20)
        # The chunk lines and the trailers are bytes of the message.
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (body[:1], body[1:5_000_000], body[5_000_000:]))
        chunks += b"0\r\nChecked: no\r\n\r\n"
        for part in ("uploads", "uploads_async"):
            with self.subTest(part), Engine(part, framing="http1 body=stream") as engine:
                stream, lines = engine.connect()
                with stream, lines:
                    for head, rest in ((b"Content-Length: %d" % len(body), body), (b"Transfer-Encoding: chunked", chunks)):
                        length, checksum, parts = self.upload(stream, lines, head, rest)
                        self.assertEqual((length, checksum), (len(rest), zlib.crc32(rest)))
                        # The head alone, and parts of up to 256 KiB.
                        self.assertGreater(parts, 32)
                code, said = engine.finish()
                self.assertEqual(code, 0, said)
                self.assertIn("2 messages: 2 done", said)
                self.assertNotIn("Error", said)

    def test_upload_is_cut(self):
        for part in ("uploads", "uploads_async"):
            with self.subTest(part), Engine(part, framing="http1 body=stream") as engine:
                stream, lines = engine.connect()
                with stream, lines:
                    stream.sendall(b"POST / HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n")
                    self.assertEqual(lines.readline(), b"HTTP/1.1 100 Continue\r\n")
                self.assertEqual(next((line for line in engine.process.stderr if "cut after" in line), None), "cut after 0 bytes\n")
                # The worker continues with the next upload.
                stream, lines = engine.connect()
                with stream, lines:
                    body = b"x" * 100_000
                    length, checksum, parts = self.upload(stream, lines, b"Content-Length: 100000", body)
                    self.assertEqual((length, checksum), (100_000, zlib.crc32(body)))
                    self.assertGreater(parts, 1)

    def test_worker_without_parts_is_refused(self):
        worker = f"{sys.executable} -B {__file__} iterate"
        run = subprocess.run(
            [COMMAND, "mux", "127.0.0.1:0", "--framing", "http1 body=stream", "--worker", worker], capture_output=True, text=True
        )
        self.assertNotEqual(run.returncode, 0)
        self.assertIn("Python: parts=True", run.stderr)


class Servers(unittest.TestCase):
    """The servers of docs/book/src/guides/workers-python.md."""

    def test_http(self):
        with Engine(None, EXAMPLES / "http_worker.py", None, "http1") as engine:
            client = http.client.HTTPConnection(engine.address, timeout=30)
            for method, target, body, chunked, answer in (
                ("GET", "/a?b=c", None, False, b"GET /a?b=c\n"),
                ("POST", "/", b"hello", False, b"hello"),
                ("PUT", "/", [b"in ", b"two chunks"], True, b"in two chunks"),
                ("HEAD", "/", None, False, b""),
            ):
                client.request(method, target, body, encode_chunked=chunked)
                response = client.getresponse()
                self.assertEqual((response.status, response.read(), response.will_close), (200, answer, False))
            client.request("GET", "/", headers={"Connection": "close"})
            self.assertTrue(client.getresponse().will_close)
            stream, lines = engine.connect()
            with stream, lines:
                stream.sendall(b"GET /old HTTP/1.0\r\n\r\n")
                self.assertTrue(lines.read().endswith(b"\r\n\r\nGET /old\n"))
            stream, lines = engine.connect()
            with stream, lines:
                stream.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: other\r\n\r\nraw")
                self.assertIn(b"\r\nConnection: close\r\n", lines.read())
            code, said = engine.finish()
            self.assertEqual(code, 0, said)

    def test_redis(self):
        with tempfile.TemporaryDirectory() as directory:
            with Engine(directory + "/store.db", EXAMPLES / "redis_worker.py", None, "redis") as engine:
                stream, lines = engine.connect()
                with stream, lines:
                    for command, answer in (
                        (b"PING\r\n", b"+PONG\r\n"),
                        (b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$3\r\n\r\n!\r\n", b"+OK\r\n"),
                        (b"*2\r\n$3\r\nget\r\n$1\r\na\r\n", b"$3\r\n\r\n!\r\n"),
                        (b"DEL a b\r\n", b":1\r\n"),
                        (b"GET a\r\n", b"$-1\r\n"),
                        (b"GET\r\n", b"-ERR unknown command, or wrong number of arguments\r\n"),
                    ):
                        stream.sendall(command)
                        self.assertEqual(lines.read(len(answer)), answer)

    @unittest.skipUnless(shutil.which("psql") or os.environ.get("CI") == "true", "needs psql")
    def test_postgres(self):
        with Engine(None, EXAMPLES / "postgres_worker.py", None, "postgres-frontend") as engine:
            host, port = engine.address.rsplit(":", 1)
            for mode in ("disable", "prefer"):
                command = ["psql", f"host={host} port={port} sslmode={mode} user=guest", "-Atc", "select 1"]
                self.assertEqual(subprocess.check_output(command, text=True, timeout=30), "select 1\n")


class Multiplexor(unittest.TestCase):
    def ends(self, lines):
        """Checks that the connection has ended, by a reset or an orderly close."""
        try:
            self.assertEqual(lines.read(), b"")
        except ConnectionResetError:
            pass

    def client(self, mux):
        stream = socket.create_connection(mux.listen("127.0.0.1:0"), timeout=30)
        lines = stream.makefile("rb")
        self.addCleanup(stream.close)
        self.addCleanup(lines.close)
        return stream, lines

    def test_datagrams(self):
        with Mux(r'delimiter="\n" strip=delimiter') as mux:
            stream, lines = self.client(mux)
            self.assertRaises(BlockingIOError, mux.recv, flags=socket.MSG_DONTWAIT)
            self.assertRaises(TimeoutError, mux.recv, timeout=0)
            self.assertRaises(TimeoutError, mux.recv, timeout=0.15)
            with self.assertRaises(OSError) as error:
                mux.send(b"x\n")
            self.assertEqual(error.exception.errno, errno.EDESTADDRREQ)

            stream.sendall(b"hello\nworld\n")
            peeked = mux.recv(2, socket.MSG_PEEK)
            self.assertEqual((peeked.bytes, peeked.length, peeked.truncated), (b"he", 6, True))
            short = mux.recv(3)
            self.assertEqual((short.bytes, short.length, short.truncated, short.end), (b"hel", 6, True, True))
            self.assertEqual((short.stripped, short.mark, short.hash), ((0, 1), 0, 0))
            mux.send(b"an", flags=socket.MSG_MORE)
            mux.send(bytearray(b"swer\n"))
            self.assertEqual(lines.readline(), b"answer\n")
            whole = mux.recv(timeout=30)
            self.assertEqual((whole.bytes, whole.length, whole.truncated, whole.end), (b"world\n", 6, False, True))
            self.assertEqual(whole.connection, short.connection)
            self.assertRaises(BrokenPipeError, mux.send, b"done\n", short)
            mux.send(b"first\n", whole, towpath.MSG_BATCH)
            mux.send(b"second\n", whole.connection)
            self.assertEqual([lines.readline(), lines.readline()], [b"first\n", b"second\n"])
            mux.done()
            self.assertRaises(BrokenPipeError, mux.send, b"done\n", whole)
            # Longer than one read, and than the socket buffers.
            stream.sendall(b"x" * 1_000_000 + b"\n")
            long = mux.recv()
            mux.send(long.bytes, long)
            self.assertEqual(lines.readline(), long.bytes)
        self.assertEqual(lines.read(), b"")

    def test_order(self):
        for wrong, why in (("some", "order must be"), ("key", "gives no key")):
            with self.assertRaisesRegex(ValueError, why):
                Mux("line", order=wrong)
        with Mux(r'delimiter="\n" strip=delimiter', order="serial") as mux:
            stream, lines = self.client(mux)
            stream.sendall(b"one\ntwo\n")
            other = mux.clone()
            with other:
                self.assertEqual(mux.recv(timeout=30).bytes, b"one\n")
                # The second message of the connection waits until the first one is done.
                self.assertRaises(TimeoutError, other.recv, timeout=0)
                mux.done()
                self.assertEqual(other.recv(timeout=30).bytes, b"two\n")

    def test_packets(self):
        with Mux("line", "seqpacket", connected=True) as mux:
            with self.assertRaises(OSError) as error:
                mux.send(b"x\n", flags=socket.MSG_EOR)
            self.assertEqual(error.exception.errno, errno.ENOTCONN)
            stream, lines = self.client(mux)
            stream.sendall(b"hello\n")
            parts = [mux.recv(3), mux.recv(1, socket.MSG_PEEK), mux.recv(100)]
            self.assertEqual([part.bytes for part in parts], [b"hel", b"l", b"lo\n"])
            self.assertEqual([part.length for part in parts], [6, 3, 3])
            self.assertEqual([part.end for part in parts], [False, False, True])
            self.assertFalse(any(part.truncated for part in parts))
            mux.send(b"an", flags=socket.MSG_DONTWAIT)
            with self.assertRaisesRegex(OSError, "the same address"):
                mux.send(b"x", parts[0])
            mux.send(b"swer\n", flags=socket.MSG_EOR)
            self.assertEqual(lines.readline(), b"answer\n")

    def test_handles(self):
        with Mux("line") as mux:
            other = mux.clone()
            stream, lines = self.client(mux)
            mux.set_receive(False)
            stream.sendall(b"hello\n")
            self.assertRaisesRegex(BlockingIOError, "disabled", mux.recv)
            message = other.recv()
            self.assertEqual(message.bytes, b"hello\n")
            self.assertRaisesRegex(ValueError, "another handle", mux.send, b"x\n", message)
            other.send(b"from the other\n", message)
            self.assertEqual(lines.readline(), b"from the other\n")
            self.assertTrue(other.close())
            mux.set_receive(True)

            def serve(handle):
                with handle:
                    for message in handle:
                        handle.send(message.bytes, message)

            threads = [threading.Thread(target=serve, args=(mux.clone(),)) for _ in range(3)]
            for thread in threads:
                thread.start()
            # Reached only if the threads wait without the interpreter's lock.
            sent = [b"%d\n" % number for number in range(300)]
            stream.sendall(b"".join(sent))
            # The threads finish in any order.
            self.assertEqual(sorted(lines.readline() for _ in sent), sorted(sent))
            mux.drain()
            for thread in threads:
                thread.join()
            self.assertIsNone(mux.recv())
            self.assertEqual(list(mux), [])
            with self.assertRaises(BrokenPipeError) as drained:
                mux.clone()
            self.assertEqual(drained.exception.errno, errno.ESHUTDOWN)
        self.assertEqual(lines.read(), b"")

    def test_attach_and_unattach(self):
        with Mux("line") as mux:
            ours, theirs = socket.socketpair()
            with ours:
                self.assertRaisesRegex(ValueError, "line", mux.attach, ours, "lime")
                connection = mux.attach(ours, 'delimiter="$"')
            with self.assertRaises(OSError) as bad:
                mux.attach(ours)
            self.assertEqual(bad.exception.errno, errno.EBADF)
            with theirs:
                theirs.sendall(b"one$two$beg")
                self.assertEqual([next(mux).bytes, next(mux).bytes], [b"one$", b"two$"])
                mux.send(b"answered$")
                back, rest = mux.unattach(connection)
                self.assertRaises(FileNotFoundError, mux.unattach, connection)
                self.assertRaises(BrokenPipeError, mux.send, b"x$", connection)
                with back:
                    theirs.sendall(b"un")
                    self.assertTrue(back.getblocking())
                    while len(rest) < len(b"begun"):
                        rest += back.recv(5)
                    self.assertEqual(rest, b"begun")
                    back.sendall(b"raw")
                with theirs.makefile("rb") as lines:
                    self.assertEqual(lines.read(), b"answered$raw")

            # By descriptor number.
            ours, theirs = socket.socketpair()
            with ours, theirs:
                connection = mux.attach(ours.fileno())
                theirs.sendall(b"last\n")
                self.assertEqual(mux.recv().connection, connection)

    def test_interrupted(self):
        class Rang(Exception):
            pass

        def ring(number, frame):
            raise Rang

        before = signal.signal(signal.SIGALRM, ring)
        self.addCleanup(signal.signal, signal.SIGALRM, before)
        with Mux("line") as mux:
            stream, lines = self.client(mux)
            with self.assertRaises(Rang):
                # Inside the call: on a busy machine the alarm may fire before the wait begins.
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                mux.recv()
            stream.sendall(b"hello\n")
            mux.send(mux.recv().bytes.upper())
            self.assertEqual(lines.readline(), b"HELLO\n")

    def test_event_loop(self):
        with Mux("line", connected=True) as mux:
            stream, lines = self.client(mux)
            for text in (b"hello\n", b"world\n"):
                self.assertTrue(mux.arm())
                self.assertEqual(select.select([mux], [], [], 0)[0], [])
                stream.sendall(text)
                self.assertEqual(select.select([mux], [], [], 30)[0], [mux])
                mux.disarm()
                self.assertEqual(select.select([mux], [], [], 0)[0], [])
                self.assertFalse(mux.arm())
                message = mux.recv(flags=socket.MSG_DONTWAIT)
                mux.send(message.bytes, message)
                self.assertEqual(lines.readline(), text)
            self.assertFalse(mux.arm(room=True))
            self.assertFalse(mux.arm(message.connection))
            mux.drain()
            if mux.arm():
                self.assertEqual(select.select([mux], [], [], 30)[0], [mux])
            mux.disarm()
            self.assertIsNone(mux.recv())

    def test_event_loop_waits_for_send_room(self):
        with Mux("line") as mux:
            ours, theirs = socket.socketpair()
            with ours:
                connection = mux.attach(ours)
            with theirs, theirs.makefile("rb") as lines:
                sent = 0
                try:
                    while True:
                        mux.send(b"x" * 10_000, connection, socket.MSG_DONTWAIT)
                        sent += 10_000
                except BlockingIOError:
                    pass
                self.assertTrue(mux.arm(connection))
                self.assertEqual(select.select([mux], [], [], 0)[0], [])
                self.assertEqual(len(lines.read(sent)), sent)
                self.assertEqual(select.select([mux], [], [], 30)[0], [mux])
                mux.disarm()
                self.assertFalse(mux.arm(connection))

    def test_limits_and_counters(self):
        with Mux("line", message_max=10) as mux:
            stream, lines = self.client(mux)
            stream.sendall(b"hello\nworld\n")
            mux.send(mux.recv().bytes)
            self.assertEqual(lines.readline(), b"hello\n")
            counted = mux.counters
            self.assertEqual((counted.connections, counted.attached, counted.ended), (1, 1, 0))
            self.assertEqual((counted.received, counted.received_bytes, counted.queued), (2, 12, 1))
            self.assertEqual((counted.done + counted.in_hand, counted.undone), (1, 0))
            self.assertEqual((counted.sent, counted.sent_bytes, counted.unsent), (1, 6, 0))
            self.assertIn("MuxCounters(connections=1, attached=1,", repr(counted))
            self.assertEqual([name for name in dir(counted)], sorted(counted._fields))
            self.assertRaisesRegex(AttributeError, "no counter", lambda: counted.nothing)
            metrics = mux.metrics()
            self.assertEqual(sorted(metrics), ["mux", "mux_accept", "mux_connection"])
            self.assertEqual((metrics["mux"]["received"], metrics["mux_connection"]["rx_bytes"]), (2, 12))
            self.assertEqual(metrics["mux_accept"]["accepted"], 1)
            mux.recv()
            mux.done()
            stream.sendall(b"longer than ten\n")
            self.ends(lines)
            counted = mux.clone().counters
            self.assertEqual((counted.connections, counted.ended, counted.too_long), (0, 1, 1))
            self.assertEqual((counted.received, counted.done, counted.bytes), (2, 2, 0))
        self.assertRaisesRegex(ValueError, "the mux is closed", lambda: mux.counters)
        for bound, counter in (("head_time", "late"), ("idle", "idle")):
            with Mux("line", **{bound: 0.001}) as mux:
                stream, lines = self.client(mux)
                if bound == "head_time":
                    stream.sendall(b"begun")
                self.ends(lines)
                self.assertEqual(getattr(mux.counters, counter), 1)
        for bound in ("message_max", "head_max", "connection_bytes", "send_bytes", "send_most", "mux_bytes"):
            self.assertRaisesRegex(ValueError, "at least 1 byte", Mux, "line", **{bound: 0})
            Mux("line", **{bound: 1 << 20}).close()
        for bound in ("head_time", "body_time", "idle", "send_time"):
            self.assertRaisesRegex(ValueError, "more than 0", Mux, "line", **{bound: 0})
            self.assertRaisesRegex(ValueError, "not negative", Mux, "line", **{bound: -1})
            Mux("line", **{bound: None}).close()

    def test_closed_by_signal_handler(self):
        for _ in range(100):
            with Mux("line", connected=True) as mux:
                before = signal.signal(signal.SIGALRM, lambda number, frame: mux.close(0))
                self.addCleanup(signal.signal, signal.SIGALRM, before)
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.05)
                    self.assertIsNone(mux.recv())
                    return self.assertRaisesRegex(ValueError, "the mux is closed", mux.recv)
                except ValueError as closed:
                    # On a busy machine the alarm may fire before the wait begins: retry.
                    self.assertIn("the mux is closed", str(closed))
        self.fail("it never rang while it waited")

    def test_invalid_arguments(self):
        self.assertRaisesRegex(ValueError, "did you mean", Mux, "lime")
        self.assertRaisesRegex(ValueError, "seqpacket", Mux, "line", "stream")
        mux = Mux("line")
        self.assertRaisesRegex(OSError, "address", mux.listen, "nowhere")
        host, port = mux.listen("127.0.0.1:0")
        with self.assertRaises(OSError) as used:
            mux.listen(f"{host}:{port}")
        self.assertEqual(used.exception.errno, errno.EADDRINUSE)
        self.assertRaisesRegex(ValueError, "flags", mux.recv, flags=socket.MSG_OOB)
        self.assertRaisesRegex(ValueError, "flags", mux.send, b"x\n", flags=socket.MSG_PEEK)
        for wrong in (-1.0, float("nan")):
            self.assertRaisesRegex(ValueError, "not negative", mux.recv, timeout=wrong)
            self.assertRaisesRegex(ValueError, "not negative", mux.close, wrong)
        for wrong in (7, "all"):
            self.assertRaises(TypeError, mux.send, b"x\n", wrong)
        self.assertTrue(mux.close())
        self.assertTrue(mux.close())
        uses = (mux.recv, mux.done, mux.clone, mux.drain, mux.fileno, mux.arm, mux.disarm, lambda: mux.send(b"x\n"), lambda: mux.listen("127.0.0.1:0"))
        for use in uses:
            self.assertRaisesRegex(ValueError, "the mux is closed", use)

    def test_example(self):
        command = [sys.executable, "-B", EXAMPLES / "mux.py", "127.0.0.1:0"]

        def hear():
            """Restores SIGINT, which is ignored in background processes."""
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hear) as server:
            try:
                host, port = server.stdout.readline().removeprefix("listening on ").strip().rsplit(":", 1)
                with socket.create_connection((host, int(port)), timeout=30) as stream, stream.makefile("rb") as lines:
                    for _ in range(10):
                        stream.sendall(b"hello\n")
                        self.assertEqual(lines.readline(), b"HELLO\n")
                    server.send_signal(signal.SIGINT)
                    self.assertEqual(lines.read(), b"")
                self.assertEqual(server.wait(), 0)
            finally:
                server.kill()


def framed(data, state):
    """One byte of length; X is another protocol, ! raises, ? is an error, / uses the mux."""
    assert isinstance(data, bytes) and data and (state.need, state.skip, state.trim, state.hash) == (0, 0, 0, 0)
    assert state.cb[4] == state.messages
    if data[:1] == b"!":
        raise ValueError("no exclamation marks")
    if data[:1] in b"?X":
        return -errno.ESTRPIPE if data[:1] == b"X" else -errno.EILSEQ
    if len(data) < 2:
        state.need = 2
        return 0
    if data[0] == 200 and len(data) <= 700:
        # A long head: bytes 0 to 700 are needed.
        return 0
    state.cb = (*state.cb[:4], state.cb[4] + 1)
    state.skip, state.mark, state.hash = 1, 7, data[1]
    return 1 + data[0] + (700 if data[0] == 200 else 0)


class MuxFramings(unittest.TestCase):
    def attach(self, mux, framing=None):
        ours, peer = socket.socketpair()
        self.addCleanup(peer.close)
        with ours:
            mux.attach(ours, framing)
        peer.settimeout(30)
        return peer

    def ended(self, mux):
        while (ended := mux.poll_ended()) is None:
            time.sleep(0.001)
        return ended

    def test_toml_and_programs(self):
        toml = towpath.Framing.from_toml("offset = 0\nlength = 1\nadjust = 1\n")
        # tcpdump -ddd: the first byte is the length.
        program = towpath.Framing.program(b"2\n48 0 0 0\n22 0 0 0\n")
        with self.assertRaisesRegex(ValueError, "^1:10: length must be 1 to 8"):
            towpath.Framing.from_toml("length = 9\n")
        for wrong in (b"", b"2\n48 0 0 0\n"):
            self.assertRaises(ValueError, towpath.Framing.program, wrong)
        with self.assertRaisesRegex(ValueError, "unknown preset"):
            towpath.Framing("lime")
        self.assertRaises(TypeError, Mux, 7)
        with Mux(toml) as mux:
            rows = (None, b"\2hi"), (toml, b"\2ho"), (program, b"\4and"), ("line", b"a\n"), (towpath.Framing("line"), b"b\n")
            for framing, data in rows:
                self.attach(mux, framing).sendall(data)
                self.assertEqual(mux.recv(timeout=30).bytes, data)

    def test_functions(self):
        self.assertRaises(TypeError, towpath.Framing.function, 7)
        with Mux(towpath.Framing.function(framed), order="key", message_max=2000) as mux:
            peer = self.attach(mux)
            peer.sendall(b"\5")
            peer.sendall(b"hello\3you" + b"\1x" * 1000)
            first = mux.recv(timeout=30)
            self.assertEqual((first.bytes, first.stripped, first.mark, first.hash), (b"\5hello", (1, 0), 7, ord("h")))
            self.assertEqual(mux.recv(timeout=30).bytes, b"\3you")
            for _ in range(1000):
                self.assertEqual(mux.recv(timeout=30).bytes, b"\1x")
            long = bytes([200]) + b"y" * 900
            peer.sendall(long)
            self.assertEqual(mux.recv(timeout=30).bytes, long)
            mux.done()
            for data, cause, number, text in (
                (b"!", "malformed", errno.EBADMSG, "ValueError: no exclamation marks"),
                (b"?", "malformed", errno.EILSEQ, "returned"),
                (b"\xff" + b"z" * 10, "inside", errno.EBADMSG, "11 of 256"),
            ):
                peer = self.attach(mux)
                peer.sendall(data)
                peer.shutdown(socket.SHUT_WR)
                ended = self.ended(mux)
                self.assertEqual((ended.cause, ended.errno, ended.socket), (cause, number, None), ended.text)
                self.assertIn(text, ended.text)
            self.assertEqual((ended.bytes, ended.length, ended.unsent, ended.peer), (11, 256, 0, ""))
            peer = self.attach(mux)
            peer.sendall(b"X-protocol")
            ended = self.ended(mux)
            self.assertEqual(ended.cause, "given_back")
            self.assertTrue(b"X-protocol".startswith(ended.rest))
            with ended.socket as back:
                back.sendall(b"raw")
                self.assertEqual(peer.recv(3), b"raw")

    def test_functions_and_threads_do_not_wait_for_each_other(self):
        """The function has the lock of the mux and waits for the interpreter's; threads have the interpreter's and call the mux."""

        def slow(data, state):
            refuses(RuntimeError, "must not use a mux", mux.metrics)
            for _ in range(50):
                pass
            return 2

        mux = Mux(towpath.Framing.function(slow))
        peer = self.attach(mux)
        stop = threading.Event()

        def look():
            while not stop.is_set():
                mux.clone().close()
                mux.counters, mux.metrics(), mux.poll_event(), mux.poll_ended()

        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        handle = mux.clone()
        for _ in range(50):
            peer.sendall(b"a\n" * 20)
            for _ in range(20):
                message = handle.recv(timeout=60)
                handle.send(message.bytes, message)
                self.assertEqual(peer.recv(2, socket.MSG_WAITALL), b"a\n")
        stop.set()
        for thread in threads:
            thread.join()
        del message
        handle.close()
        mux.close()

    def test_program_ends_without_close(self):
        program = (
            "import socket, towpath\n"
            "mux = towpath.Mux(towpath.Framing.function(lambda data, state: 2))\n"
            "ours, peer = socket.socketpair()\n"
            "mux.attach(ours)\n"
            "peer.sendall(b'ab' * 10000)\n"
            "assert mux.recv().bytes == b'ab'\n"
            "peer.sendall(b'ab' * 10000)\n"
        )
        for _ in range(5):
            ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
            self.assertEqual((ended.returncode, ended.stderr), (0, b""))


class MuxServers(unittest.TestCase):
    def exchange(self, clients, server):
        """Sends a line with a mux of clients, and returns the server's message."""
        while True:
            try:
                clients.send(b"hello\n")
                break
            except OSError as error:
                self.assertEqual(error.errno, errno.ENOTCONN)
                time.sleep(0.001)
        message = server.recv(timeout=30)
        server.send(message.bytes.upper())
        self.assertEqual(clients.recv(timeout=30).bytes, b"HELLO\n")
        return message

    def test_tls(self):
        with tempfile.TemporaryDirectory() as name, Mux("line") as server, Mux("line", connected=True) as clients:
            directory = pathlib.Path(name)
            command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key.pem -out cert.pem"
            names = ["-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE"]
            subprocess.run(command.split() + names, cwd=name, check=True, capture_output=True)
            certificate, key = directory / "cert.pem", directory / "key.pem"
            with self.assertRaisesRegex(ValueError, "missing.pem"):
                server.listen_tls("127.0.0.1:0", certificate, directory / "missing.pem")
            host, port = server.listen_tls("127.0.0.1:0", certificate, key, handshake_time=60)
            with self.assertRaisesRegex(ValueError, "cert.pem"):
                clients.connect(f"{host}:{port}", tls_roots=directory / "no-cert.pem")
            connector = clients.connect(
                f"{host}:{port}", tls_roots=certificate, tls_name="localhost", pause=0.001, pause_most=0.001
            )
            message = self.exchange(clients, server)
            info = server.connection_info(message.connection)
            self.assertEqual((info.tls, info.server_name, info.listener), (True, "localhost", f"{host}:{port}"))
            self.assertEqual((info.local, info.protocol, info.client_names), (f"{host}:{port}", b"", []))
            self.assertTrue(info.peer.startswith("127.0.0.1:"))
            connector.close()
            # Python's own TLS.
            context = ssl.create_default_context(cafile=str(certificate))
            with socket.create_connection((host, port), timeout=30) as plain:
                with context.wrap_socket(plain, server_hostname="localhost") as stream:
                    stream.sendall(b"by ssl\n")
                    message = server.recv(timeout=30)
                    server.send(message.bytes)
                    self.assertEqual(stream.recv(100), b"by ssl\n")
            # With certificates of clients.
            host, guarded = server.listen_tls("127.0.0.1:0", certificate, key, client_ca=certificate)
            context.load_cert_chain(certificate, key)
            with socket.create_connection((host, guarded), timeout=30) as plain:
                with context.wrap_socket(plain, server_hostname="localhost") as stream:
                    stream.sendall(b"known\n")
                    message = server.recv(timeout=30)
                    self.assertEqual(server.connection_info(message.connection).client_names, ["localhost"])
                    server.done()
            # Not TLS: no connection, and an event.
            self.assertIsNone(server.poll_event())
            with socket.create_connection((host, port), timeout=30) as plain:
                plain.sendall(b"this is not TLS\n")
                while (event := server.poll_event()) is None:
                    time.sleep(0.001)
            self.assertEqual((event.kind, event.connection, event.bytes, event.sent), ("not_attached", None, b"", 0))
            self.assertTrue(event.text and event.peer.startswith("127.0.0.1:"))

    def test_certificates_are_read_again(self):
        with tempfile.TemporaryDirectory() as name, Mux("line") as server:
            directory = pathlib.Path(name)
            for at in ("old", "new"):
                command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {at}.key -out {at}.pem"
                names = ["-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE"]
                subprocess.run(command.split() + names, cwd=name, check=True, capture_output=True)
            certificate, key = directory / "cert.pem", directory / "key.pem"
            certificate.write_bytes((directory / "old.pem").read_bytes())
            key.write_bytes((directory / "old.key").read_bytes())
            server.reload_tls()  # without a listener with TLS
            address = server.listen_tls("127.0.0.1:0", certificate, key)

            def connect(trusted):
                context = ssl.create_default_context(cafile=str(directory / f"{trusted}.pem"))
                plain = socket.create_connection(address, timeout=30)
                return context.wrap_socket(plain, server_hostname="localhost")

            def exchange(stream):
                stream.sendall(b"hello\n")
                server.send(server.recv(timeout=30).bytes)
                self.assertEqual(stream.recv(100), b"hello\n")
                server.done()

            with connect("old") as before:
                exchange(before)
                certificate.write_bytes((directory / "new.pem").read_bytes())
                with self.assertRaisesRegex(ValueError, "cert.pem and the key"):
                    server.reload_tls()
                connect("old").close()
                key.write_bytes((directory / "new.key").read_bytes())
                server.reload_tls()
                with self.assertRaises(ssl.SSLCertVerificationError):
                    connect("old")
                with connect("new") as after:
                    exchange(after)
                exchange(before)  # its connection is not affected

    def test_starttls(self):
        with tempfile.TemporaryDirectory() as name, Mux("line") as none, Mux("smtp") as server:
            directory = pathlib.Path(name)
            command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key.pem -out cert.pem"
            names = ["-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE"]
            subprocess.run(command.split() + names, cwd=name, check=True, capture_output=True)
            files = directory / "cert.pem", directory / "key.pem"
            with self.assertRaisesRegex(ValueError, "starttls"):
                none.listen_tls("127.0.0.1:0", *files, starttls=True)
            address = server.listen_tls("127.0.0.1:0", *files, starttls=True)
            with socket.create_connection(address, timeout=30) as plain:
                lines = plain.makefile("rb")
                self.assertTrue(lines.readline().startswith(b"220 "))
                plain.sendall(b"MAIL FROM:<a@example>\r\n")
                self.assertTrue(lines.readline().startswith(b"530 "))
                plain.sendall(b"STARTTLS\r\n")
                self.assertTrue(lines.readline().startswith(b"220 "))
                context = ssl.create_default_context(cafile=str(files[0]))
                with context.wrap_socket(plain, server_hostname="localhost") as stream:
                    stream.sendall(b"NOOP\r\n")
                    message = server.recv(timeout=30)
                    self.assertEqual(message.bytes, b"NOOP\r\n")
                    info = server.connection_info(message.connection)
                    self.assertEqual((info.tls, info.starttls), (True, True))
                    server.send(b"250 fine\r\n")
                    self.assertEqual(stream.recv(100), b"250 fine\r\n")
                    server.done()

    def test_unix_sockets(self):
        with tempfile.TemporaryDirectory() as name, Mux("line") as server, Mux("line", connected=True) as clients:
            path = pathlib.Path(name) / "server.sock"
            self.assertRaises(FileNotFoundError, server.listen_unix, path / "no")
            server.listen_unix(path)
            # The connection stays without the object.
            clients.connect(f"unix:{path}")
            gc.collect()
            message = self.exchange(clients, server)
            info = server.connection_info(message.connection)
            self.assertEqual((info.tls, info.listener), (False, f"unix:{path}"))
            server.done()
            clients.done()
            clients.drain()
            while (ended := server.poll_ended()) is None:
                time.sleep(0.001)
            self.assertEqual((ended.connection, ended.cause, ended.text), (message.connection, "clean", "closed by the peer"))
            self.assertIsNone(server.connection_info(message.connection))

    def test_admission(self):
        """One connection of a peer at a time."""
        inside, left = [], threading.Event()

        def admit(remote, local):
            self.assertTrue(remote.startswith("127.0.0.1:") and local.startswith("127.0.0.1:") and remote != local)
            if len(inside) == 2:
                raise KeyError("a defect")
            inside.append(remote)
            return towpath.Admit.PASS if len(inside) == 1 else towpath.Admit.RESET

        reported = []
        self.addCleanup(setattr, sys, "unraisablehook", sys.unraisablehook)
        sys.unraisablehook = lambda raised: reported.append(raised.exc_type)
        with Mux("line") as mux:
            self.assertRaises(TypeError, mux.set_admission, 7)
            mux.set_admission(admit, lambda remote, local: left.set())
            address = mux.listen("127.0.0.1:0")
            with socket.create_connection(address, timeout=30) as first:
                first.sendall(b"hello\n")
                self.assertEqual(mux.recv(timeout=30).bytes, b"hello\n")
                # The reset may arrive before connect(2) returns.
                with self.assertRaises(ConnectionResetError), socket.create_connection(address, timeout=30) as second:
                    second.recv(1)
                with socket.create_connection(address, timeout=30) as third:
                    self.assertEqual(third.recv(1), b"")
                mux.done()
                self.assertFalse(left.is_set())
            self.assertTrue(left.wait(30))
            self.assertEqual(reported, [KeyError])
            self.assertEqual(mux.metrics()["mux_accept"]["denied"], 1)

    def test_asyncio(self):
        async def serve(mux, count):
            async for message in mux:
                await mux.asend(message.bytes.upper(), message)
                count.append(message.bytes)

        async def client(address, lines):
            reader, writer = await asyncio.open_connection(*address)
            for line in lines:
                writer.write(line)
                self.assertEqual(await reader.readline(), line.upper())
            writer.close()
            await writer.wait_closed()

        async def main():
            with Mux("line") as mux, mux.clone() as other:
                address, counts = mux.listen("127.0.0.1:0"), ([], [])
                servers = [asyncio.create_task(serve(*each)) for each in zip((mux, other), counts)]
                lines = [f"line {number}\n".encode() for number in range(100)]
                await asyncio.gather(*(client(address, lines) for _ in range(8)))
                mux.drain()
                await asyncio.gather(*servers)
                self.assertEqual(len(counts[0]) + len(counts[1]), 800)
                self.assertIsNone(await mux.arecv())

        asyncio.run(main())

    def test_asyncio_waits_for_room(self):
        async def main():
            ours, peer = socket.socketpair()
            with ours, peer, Mux("line") as mux:
                connection = mux.attach(ours)
                received = asyncio.create_task(mux.arecv())
                line = b"x" * 65535 + b"\n"
                sender = asyncio.create_task(self.lines(mux, line, connection, 100))
                peer.setblocking(False)
                loop, got = asyncio.get_running_loop(), 0
                while got < 100 * len(line):
                    got += len(await loop.sock_recv(peer, 1 << 16))
                await sender
                # A message arrives at the task that waited meanwhile.
                await loop.sock_sendall(peer, b"last\n")
                self.assertEqual((await received).bytes, b"last\n")

        asyncio.run(main())

    async def lines(self, mux, line, connection, count):
        for _ in range(count):
            await mux.asend(line, connection)


class SenderTests(unittest.TestCase):
    def test_send_is_awaited(self):
        async def main():
            ours, peer = socket.socketpair()
            with ours, peer, Sender(ours, choice="plain") as sender:
                data = bytes(4 << 20)
                task = asyncio.create_task(sender.send(data, id="all"))
                peer.setblocking(False)
                loop, got = asyncio.get_running_loop(), 0
                while got < len(data):
                    got += len(await loop.sock_recv(peer, 1 << 16))
                await task
                sender.drain()
                self.assertEqual(sender.reclaim(), ["all"])
            with self.assertRaisesRegex(ValueError, "the sender is closed"):
                await sender.send(b"")

        asyncio.run(main())

    """Tests of Sender, over loopback."""

    def pair(self, **options):
        """Returns a sender and the peer's socket."""
        ours, peer = self.sockets()
        with ours:
            sender = Sender(ours, **options)
        # Connections that a test leaves open are reset.
        self.addCleanup(sender.close, 0)
        return sender, peer

    def sockets(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            # Less than `stuff` queues, however long it takes.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
            ours = socket.socket()
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 300_000)
            ours.connect(server.getsockname())
            peer, _ = server.accept()
        peer.settimeout(30)
        self.addCleanup(peer.close)
        return ours, peer

    def reset(self, sender, peer):
        """Resets the connection at the peer and waits for the reset."""
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        end = select.poll()
        end.register(sender, 0)
        while not any(event & select.POLLHUP for _, event in end.poll()):
            pass

    def stuff(self, sender):
        """Queues more than the socket buffers hold and returns the queued buffers."""
        lent = [bytearray(1 << 20) for _ in range(8)]
        for data in lent:
            sender.queue(data)
        return lent

    def ring_when_it_works(self, sender):
        """Sends SIGALRM while the calling thread is in a call on the sender."""

        def ring():
            try:
                while True:
                    sender.fileno()
            except RuntimeError:
                os.kill(os.getpid(), signal.SIGALRM)

        thread = threading.Thread(target=ring)
        thread.start()
        self.addCleanup(thread.join)

    def read_all(self, peer):
        """Reads in a thread; the returned function joins it and returns the data."""
        read = bytearray()

        def run():
            while part := peer.recv(1 << 18):
                read.extend(part)

        thread = threading.Thread(target=run)
        thread.start()

        def join():
            thread.join()
            return bytes(read)

        return join

    def resizes(self, *buffers):
        for buffer in buffers:
            buffer.append(0)
            buffer.pop()

    def test_all_bytes_arrive(self):
        for choice in ("adaptive", "zerocopy", "plain"):
            with self.subTest(choice):
                sender, peer = self.pair(choice=choice, max_buffers=16, tamper_check=True)
                join = self.read_all(peer)
                sent, lent, back = [], 0, 0
                with sender:
                    for number, size in enumerate([1, 0, 100, 70_000, 1_000_000, 16_384, 5] * 20):
                        data = bytearray(number.to_bytes(2, "big") * (size // 2 + 1))[:size]
                        sent.append(bytes(data))
                        while lent - back == 16:
                            came = sender.reclaim()
                            back += len(came)
                            if not came:
                                sender.drain(30)
                            self.resizes(*came)
                        sender.queue(data)
                        lent += 1
                    sender.drain(30)
                    back += len(sender.reclaim())
                    self.assertEqual((back, sender.reclaim()), (lent, []))
                self.assertEqual(join(), b"".join(sent))
                counted = sender.counters
                self.assertEqual(counted.zerocopy_bytes + counted.plain_bytes, sum(map(len, sent)))
                self.assertEqual((counted.calls, counted.tampered), (counted.completed, 0))
                self.assertEqual(counted.calls > 0, choice == "zerocopy" or counted.zerocopy_bytes > 0)
                self.assertIn(f"plain_bytes={counted.plain_bytes}", repr(counted))
                self.assertEqual((counted, sender.pinned), (sender.counters, []))

    def test_buffer_types(self):
        sender, peer = self.pair()
        numbers, wide = array.array("d", [1.5, 2.5]), memoryview(bytes(range(12))).cast("B", (3, 4))
        things = [b"bytes", bytearray(b"array"), memoryview(b"a view")[2:], numbers, wide, memoryview(b""), bytearray()]
        for thing in things:
            sender.queue(thing)
        sender.queue(b"!", "its id")
        sender.queue(b"?", 0)
        join = self.read_all(peer)
        self.assertTrue(sender.close(30))
        self.assertEqual(join(), b"".join(bytes(thing) for thing in things) + b"!?")
        back = sender.reclaim()
        self.assertEqual([id(one) for one in back[: len(things)]], [id(one) for one in things])
        self.assertEqual(back[len(things) :], ["its id", 0])
        self.assertEqual(sender.reclaim(), [])

    def test_queued_buffer_cannot_be_resized(self):
        sender, peer = self.pair()
        small, large = bytearray(b"x" * 100), bytearray(b"y" * 1_000_000)
        view = memoryview(bytearray(b"z" * 10))
        for data in (small, large, view):
            sender.queue(data)
        for data in (small, large):
            self.assertRaises(BufferError, data.append, 0)
        join = self.read_all(peer)
        sender.drain(30)
        # The exports end when reclaim returns the buffers.
        for data in (small, large):
            self.assertRaises(BufferError, data.append, 0)
        self.assertEqual(sender.reclaim(), [small, large, view])
        self.resizes(small, large)
        view.release()

        # A close ends the exports too.
        sender.queue(small)
        self.assertRaises(BufferError, small.append, 0)
        self.assertTrue(sender.close(30))
        self.resizes(small)
        self.assertIs(sender.reclaim()[0], small)
        self.assertEqual(join(), b"x" * 100 + b"y" * 1_000_000 + b"z" * 10 + b"x" * 100)

    def test_max_buffers(self):
        sender, peer = self.pair(max_buffers=2)
        first, second, third = bytearray(b"1"), bytearray(b"2"), bytearray(b"3")
        sender.queue(first)
        sender.queue(second)
        with self.assertRaisesRegex(BlockingIOError, "reclaim"):
            sender.queue(third)
        self.resizes(third)
        sender.drain(30)
        self.assertRaises(BlockingIOError, sender.queue, third)
        self.assertEqual(len(sender.reclaim()), 2)
        sender.queue(third)
        self.assertTrue(sender.close(30))
        self.assertEqual(peer.makefile("rb").read(), b"123")

    def test_peer_resets(self):
        for choice in ("zerocopy", "plain"):
            with self.subTest(choice):
                sender, peer = self.pair(choice=choice)
                lent = self.stuff(sender)
                self.reset(sender, peer)
                for _ in range(2):
                    with self.assertRaises((ConnectionResetError, BrokenPipeError)):
                        sender.drain(30)
                more = bytearray(1 << 20)
                with self.assertRaises((ConnectionResetError, BrokenPipeError)):
                    # A socket that was just full is not tried again.
                    sender.queue(more)
                    sender.flush(30)
                self.assertRaises(BufferError, more.append, 0)
                lent.append(more)
                back = sender.reclaim()
                self.assertFalse(sender.close(30))
                back += sender.reclaim()
                self.accounted(sender, lent, back)

    def test_close_reports_data_lost_by_reset(self):
        for choice in ("zerocopy", "plain"):
            with self.subTest(choice):
                sender, peer = self.pair(choice=choice)
                data = bytearray(100_000)
                sender.queue(data)
                sender.flush(30)
                # The kernel has all of the data; the peer has read none.
                self.reset(sender, peer)
                self.assertFalse(sender.close(30))
                self.accounted(sender, [data], sender.reclaim())

    def test_peer_does_not_read(self):
        for choice in ("zerocopy", "plain"):
            with self.subTest(choice):
                sender, peer = self.pair(choice=choice)
                lent = self.stuff(sender)
                self.assertRaises(TimeoutError, sender.drain, 0)
                self.assertRaises(TimeoutError, sender.drain, 0.15)
                self.assertFalse(sender.close(0.15))
                self.accounted(sender, lent, sender.reclaim())
                self.assertFalse(sender.close())

    def accounted(self, sender, lent, back):
        """Checks that each buffer was returned, or is pinned and cannot be resized."""
        pinned = sender.pinned
        self.assertEqual(sorted(map(id, lent)), sorted(map(id, back + pinned)))
        self.assertEqual((sender.reclaim(), len(sender.pinned)), ([], len(pinned)))
        self.resizes(*back)
        for data in pinned:
            self.assertRaises(BufferError, data.append, 0)

    def test_peer_stalls(self):
        sender, peer = self.pair(stall=1)
        self.stuff(sender)
        with self.assertRaisesRegex(TimeoutError, "stopped reading"):
            sender.flush()
        # The transfer may continue.
        join = self.read_all(peer)
        for _ in range(60):
            try:
                sender.drain(60)
                break
            except TimeoutError:
                # The reader was not scheduled for that long.
                pass
        self.assertTrue(sender.close(30))
        self.assertEqual(len(join()), sender.counters.zerocopy_bytes + sender.counters.plain_bytes)

    def test_dropped_without_close(self):
        ours, peer = self.sockets()
        with ours:
            sender = Sender(ours, choice="zerocopy")
            lent = self.stuff(sender)
            lent.append(bytearray(b"behind them"))
            sender.queue(lent[-1])
            pinned = sender.counters.calls > sender.counters.completed
            del sender
            # Buffers that the kernel has not seen are free; completions of the rest are lost.
            self.resizes(lent[-1])
            if pinned:
                self.assertRaises(BufferError, lent[0].append, 0)

    def test_pinned_buffers_stay_exported(self):
        if os.geteuid() != 0:
            print("not root: what stays pinned behind a reset is not tried")
            return
        inside = ["unshare", "--net", sys.executable, "-B", "-X", "dev", __file__, "pinned"]
        run = subprocess.run(inside, capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stderr)
        print(run.stdout, end="")

    def test_with_raises_send_errors(self):
        sender, peer = self.pair()
        with self.assertRaises((ConnectionResetError, BrokenPipeError)):
            with sender:
                sender.queue(b"x" * 100_000)
                sender.flush(30)
                self.reset(sender, peer)
        # An exception of the body takes precedence; a result of close is not raised again.
        sender, peer = self.pair()
        with self.assertRaises(ZeroDivisionError):
            with sender:
                sender.queue(b"x" * 100_000)
                sender.flush(30)
                self.reset(sender, peer)
                1 // 0
        sender, peer = self.pair()
        with sender:
            self.reset(sender, peer)
            self.assertFalse(sender.close())
        with sender:
            pass

    def test_interrupted(self):
        class Rang(Exception):
            pass

        def ring(number, frame):
            raise Rang

        before = signal.signal(signal.SIGALRM, ring)
        self.addCleanup(signal.signal, signal.SIGALRM, before)
        sender, peer = self.pair()
        lent = self.stuff(sender)
        for wait in (sender.flush, sender.drain, lambda: sender.close(3600)):
            self.ring_when_it_works(sender)
            self.assertRaises(Rang, wait)
        # The state is unchanged.
        join = self.read_all(peer)
        sender.drain(30)
        self.assertEqual(len(sender.reclaim()), len(lent))
        self.assertTrue(sender.close(30))
        self.assertEqual(len(join()), len(lent) << 20)

        # An interrupted exit of a with block does not wait again.
        sender, peer = self.pair()
        with self.assertRaises(Rang), sender:
            self.stuff(sender)
            self.ring_when_it_works(sender)
        self.assertRaisesRegex(ValueError, "the sender is closed", sender.flush)

    def test_closed_by_signal_handler(self):
        sender, peer = self.pair()
        self.stuff(sender)
        before = signal.signal(signal.SIGALRM, lambda number, frame: sender.close(0))
        self.addCleanup(signal.signal, signal.SIGALRM, before)
        self.ring_when_it_works(sender)
        self.assertRaisesRegex(ValueError, "the sender is closed", sender.drain)

    def test_other_threads_run_during_wait(self):
        sender, peer = self.pair()
        lent = self.stuff(sender)
        draining = threading.Thread(target=sender.drain)
        draining.start()
        # The sender can be used before the wait and between two waits.
        refused = False
        while not refused:
            try:
                sender.reclaim()
            except RuntimeError:
                refused = True
        join = self.read_all(peer)
        draining.join()
        self.assertTrue(sender.close(30))
        self.assertEqual(len(join()), len(lent) << 20)

    def test_forked_child_does_not_affect_sender(self):
        sender, peer = self.pair()
        data = bytearray(b"parent")
        sender.queue(data)
        child = os.fork()
        if child == 0:
            # The child must not run further tests.
            try:
                for use in (sender.flush, sender.drain, sender.reclaim, lambda: sender.queue(b"child")):
                    refuses(ValueError, "another process", use)
                with sender:
                    pass
                assert not sender.close()
                self.resizes(data)
                os._exit(0)
            finally:
                os._exit(1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        sender.queue(b" only")
        self.assertTrue(sender.close(30))
        self.assertEqual(peer.makefile("rb").read(), b"parent only")

    def test_event_loop(self):
        sender, peer = self.pair(choice="zerocopy")
        lent = self.stuff(sender)
        events, read, back = select.poll(), 0, []
        events.register(sender, select.POLLOUT)
        events.register(peer, select.POLLIN)
        while len(back) < len(lent):
            for fd, event in events.poll():
                if fd == peer.fileno():
                    read += len(peer.recv(1 << 18))
                    continue
                try:
                    sender.flush(0)
                    events.modify(sender, 0)
                except TimeoutError:
                    pass
                back += sender.reclaim()
        join = self.read_all(peer)
        self.assertTrue(sender.close(30))
        self.assertEqual(read + len(join()), len(lent) << 20)

    def test_datagrams(self):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:
            peer.settimeout(30)
            peer.bind(("127.0.0.1", 0))
            ours.connect(peer.getsockname())
            with Sender(ours.fileno(), segment=1000, choice="zerocopy") as sender:
                sender.queue(b"a" * 1000 + b"b" * 1000 + b"c" * 5)
                sender.flush(30)
                self.assertEqual([peer.recv(2000) for _ in range(3)], [b"a" * 1000, b"b" * 1000, b"c" * 5])
                with self.assertRaises(OSError) as long:
                    sender.queue(bytes(100_000))
                    sender.flush(30)
                self.assertEqual(long.exception.errno, errno.EMSGSIZE)
                sender.queue(b"d")
                sender.drain(30)
                self.assertEqual(peer.recv(2000), b"d")
                self.assertEqual(len(sender.reclaim()), 3)

    def test_invalid_arguments(self):
        ours, peer = self.sockets()
        with ours:
            self.assertRaisesRegex(ValueError, "adaptive", Sender, ours, choice="fast")
            self.assertRaisesRegex(ValueError, "max_buffers", Sender, ours, max_buffers=0)
            self.assertRaisesRegex(ValueError, "segment", Sender, ours, segment=0)
            for wrong in (0, -1.0, float("nan")):
                self.assertRaises(ValueError, Sender, ours, stall=wrong)
            self.assertRaises(OverflowError, Sender, ours, max_pinned=-1)
            self.assertRaises(TypeError, Sender, ours, "adaptive")
            with open(os.devnull) as no_socket:
                for wrong, number in ((-1, errno.EBADF), (no_socket, errno.ENOTSOCK)):
                    with self.assertRaises(OSError) as bad:
                        Sender(wrong)
                    self.assertEqual(bad.exception.errno, number)
            sender = Sender(ours)
        one, other = socket.socketpair()
        with one, other:
            with self.assertRaisesRegex(OSError, 'choice="adaptive"') as refused:
                Sender(one, choice="zerocopy")
            self.assertEqual(refused.exception.errno, errno.EOPNOTSUPP)
            with Sender(one) as plain:
                plain.queue(b"plain")
            self.assertEqual(other.recv(9), b"plain")
        for wrong in ("text", 7, None):
            self.assertRaises(TypeError, sender.queue, wrong)
        self.assertRaisesRegex(ValueError, "not contiguous", sender.queue, memoryview(b"apart")[::2])
        released = memoryview(b"x")
        released.release()
        self.assertRaises(ValueError, sender.queue, released)
        for wrong in (-1.0, float("nan")):
            for wait in (sender.flush, sender.drain, sender.close):
                self.assertRaisesRegex(ValueError, "not negative", wait, wrong)
        self.assertEqual(sender.reclaim(), [])
        self.assertTrue(sender.close())
        self.assertTrue(sender.close())
        for use in (sender.flush, sender.drain, sender.fileno, lambda: sender.queue(b"x")):
            self.assertRaisesRegex(ValueError, "the sender is closed", use)

    def test_example(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = "%s:%d" % server.getsockname()
            command = [sys.executable, "-B", EXAMPLES / "sender.py", address, towpath.__file__]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sending:
                try:
                    stream, _ = server.accept()
                    with stream, stream.makefile("rb") as read:
                        self.assertEqual(read.read(), pathlib.Path(towpath.__file__).read_bytes())
                    self.assertIn(" plain", sending.stdout.read())
                    self.assertEqual(sending.wait(), 0)
                finally:
                    sending.kill()


class Packets(unittest.TestCase):
    def replay(self, rules, command, **environment):
        arguments = [OFFICE / "office.pcap", "--rules", rules, "--json", "--deadline", "60", "--queue", f"1={command}"]
        run = subprocess.run(
            [COMMAND, "replay", *arguments], capture_output=True, text=True, env={**os.environ, **environment}
        )
        self.assertEqual(run.returncode, 0, run.stderr)
        return json.loads(run.stdout)

    def test_verdicts_of_every_kind(self):
        with tempfile.TemporaryDirectory() as directory:
            rules = pathlib.Path(directory) / "rules.ipfw"
            rules.write_text("add inspect 1 ip4 from any to any\nadd allow all from any to any\n")
            mark = pathlib.Path(directory) / "mark"
            for part in ("one_by_one", "many", "held", "capitals", "loop"):
                with self.subTest(part):
                    command = f"{sys.executable} -B {__file__} {part}"
                    queue = self.replay(rules, command, TOWPATH_MARK=str(mark))["queues"][0]
                    self.assertEqual(mark.read_text(), part)
                    self.assertEqual(queue["lost"], 0)
                    frames, passed, dropped = queue["frames"], queue["passed"], queue["dropped"]
                    self.assertGreater(frames, 100)
                    if part == "one_by_one":
                        self.assertEqual((dropped, passed), ((frames + 1) // 2, frames // 2))
                    elif part == "many":
                        self.assertGreater(dropped, 0)
                        self.assertEqual(passed, frames - dropped)
                    elif part == "capitals":
                        self.assertEqual(queue["replaced"], frames)
                    else:
                        self.assertEqual(passed, frames)

    def test_example_matches_rust_inspector(self):
        rules = OFFICE / "office.ipfw"
        ours = self.replay(rules, f"{sys.executable} -B {EXAMPLES / 'inspector.py'} password=")["queues"][0]
        peers = self.replay(rules, "towpath inspect --queue 1 --match password= --verdict drop")["queues"][0]
        self.assertGreater(ours["dropped"], 0)
        for key in ("frames", "passed", "dropped", "lost"):
            self.assertEqual(ours[key], peers[key], key)


if __name__ == "__main__":
    parts(sys.argv[1])
