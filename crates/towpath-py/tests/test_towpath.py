"""The module towpath. tests/python.rs runs this with the module in PYTHONPATH and the command line in TOWPATH."""

import ast
import errno
import json
import os
import pathlib
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import unittest

import towpath
from towpath import Inspector, Mux, Verdict, Worker

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
        refuses(OSError, "larger than the other side takes", frame.replace, too_long)
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
    # In one piece: what others send may come between two answers.
    message.reply(bytearray(b"a " + message.bytes))


def iterate(worker):
    for message in worker:
        answer(message)
        worker.send(b"sent\n", message.connection)
        assert message.connection == message.connection and message.connection.index >= 0
        hash(message.connection)


def receive(worker):
    while message := worker.recv():
        answer(message)
        worker.send(b"sent\n", message.connection)
        message.done()
        refuses(ValueError, "done before", message.done)
        refuses(ValueError, "done before", message.reply, b"late\n")


def interrupted(worker):
    """Serves as `iterate` does when a signal's handler has raised an exception out of one wait."""

    class Rang(Exception):
        pass

    def ring(number, frame):
        raise Rang

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    # Nobody asks anything before this is said: an exception between recv and the answer would lose a message.
    refuses(Rang, "", worker.recv)
    print("interrupted", file=sys.stderr, flush=True)
    iterate(worker)


def full(worker):
    """Serves as `iterate` does when a signal's handler has raised an exception out of a wait for room: the mux is stopped until then."""

    class Rang(Exception):
        pass

    def ring(number, frame):
        raise Rang

    def fill():
        while True:
            # What has no bytes is no message.
            worker.send(b"", message.connection)

    signal.signal(signal.SIGALRM, ring)
    message = worker.recv()
    if message is None:
        return
    with socket.socket(fileno=os.dup(worker.fileno())) as ours:
        mux, _, _ = struct.unpack("3i", ours.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    os.kill(mux, signal.SIGSTOP)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
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
    """Serves as `iterate` does, when others could run while it waited; and is closed then."""
    got, refused = [], 0

    def wait():
        try:
            got.append(worker.recv(0.1))
        except TimeoutError:
            pass

    waiting = threading.Thread(target=wait)
    waiting.start()
    while waiting.is_alive():
        try:
            worker.flush()
        except RuntimeError:
            refused += 1
    waiting.join()
    assert refused > 0 or got
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


def parts(name):
    """What this file does as an inspector or worker: `test_towpath.py NAME`."""
    inspectors = {"one_by_one": one_by_one, "many": many, "held": held, "capitals": capitals, "loop": loop}
    workers = {"iterate": iterate, "receive": receive, "interrupted": interrupted, "full": full, "checked": checked}
    if name in inspectors:
        with Inspector(name="test", gaps=False) as queue:
            inspectors[name](queue)
    else:
        with Worker(name="test") as worker:
            workers[name](worker)
    # That it came to its end is seen by what it leaves.
    if mark := os.environ.get("TOWPATH_MARK"):
        pathlib.Path(mark).write_text(name)


class Module(unittest.TestCase):
    def test_types_are_those_of_the_module(self):
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
                public = {name for name in here if not name.startswith("_")}
                stubbed = set(names(statement.body))
                self.assertEqual({name for name in stubbed if not name.startswith("_")}, public, statement.name)
                self.assertLessEqual(stubbed, set(here), statement.name)
                self.assertTrue(here["__doc__"], statement.name)

    def test_errors_say_what_to_do(self):
        for attach in (Inspector, Worker):
            with self.assertRaisesRegex(OSError, "TOWPATH_SOCKET is not set"):
                attach()
            with self.assertRaisesRegex(FileNotFoundError, "/nonexistent/socket"):
                attach("/nonexistent/socket", name="me")
            with self.assertRaises(TypeError):
                attach(3)


class Engine:
    """towpath mux with workers that are this file."""

    def __init__(self, part, example=None):
        command = [sys.executable, "-B", example or __file__, *([] if example else [part])]
        self.process = subprocess.Popen(
            [COMMAND, "mux", "127.0.0.1:0", "--framing", 'delimiter="\\n" strip=delimiter', "--order", "replies"]
            + ["--workers", "2", "--worker", " ".join(map(str, command))],
            stderr=subprocess.PIPE,
            text=True,
        )
        line = self.process.stderr.readline()
        self.address = line.removeprefix("listening on ").strip()
        # In whatever order they are said.
        awaited = ["workers attached"] + ["interrupted"] * (2 if part == "interrupted" else 0)
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
    def test_messages_are_answered(self):
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

    def test_the_example(self):
        with Engine(None, EXAMPLES / "worker.py") as engine:
            stream, lines = engine.connect()
            with stream, lines:
                stream.sendall(b"hello\n")
                self.assertEqual(lines.readline(), b"HELLO\n")


class Multiplexor(unittest.TestCase):
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
            with self.assertRaises(OSError) as nobody:
                mux.send(b"x\n")
            self.assertEqual(nobody.exception.errno, errno.EDESTADDRREQ)

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
            # It is longer than what any read brings, and than sockets hold.
            stream.sendall(b"x" * 1_000_000 + b"\n")
            long = mux.recv()
            mux.send(long.bytes, long)
            self.assertEqual(lines.readline(), long.bytes)
        self.assertEqual(lines.read(), b"")

    def test_packets(self):
        with Mux("line", "seqpacket", connected=True) as mux:
            with self.assertRaises(OSError) as nobody:
                mux.send(b"x\n", flags=socket.MSG_EOR)
            self.assertEqual(nobody.exception.errno, errno.ENOTCONN)
            stream, lines = self.client(mux)
            stream.sendall(b"hello\n")
            parts = [mux.recv(3), mux.recv(1, socket.MSG_PEEK), mux.recv(100)]
            self.assertEqual([part.bytes for part in parts], [b"hel", b"l", b"lo\n"])
            self.assertEqual([part.length for part in parts], [6, 3, 3])
            self.assertEqual([part.end for part in parts], [False, False, True])
            self.assertFalse(any(part.truncated for part in parts))
            mux.send(b"an", flags=socket.MSG_DONTWAIT)
            with self.assertRaisesRegex(OSError, "for one address"):
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
            # They wait without the interpreter's lock, or this is not said.
            sent = [b"%d\n" % number for number in range(300)]
            stream.sendall(b"".join(sent))
            # In whatever order they are done.
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

    def test_attached_and_given_back(self):
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

            # By its number.
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
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            self.assertRaises(Rang, mux.recv)
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

    def test_event_loop_waits_for_room(self):
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

    def test_closed_by_a_handler(self):
        with Mux("line", connected=True) as mux:
            before = signal.signal(signal.SIGALRM, lambda number, frame: mux.close(0))
            self.addCleanup(signal.signal, signal.SIGALRM, before)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            self.assertIsNone(mux.recv())
            self.assertRaisesRegex(ValueError, "the mux is closed", mux.recv)

    def test_refusals(self):
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

    def test_the_example(self):
        command = [sys.executable, "-B", EXAMPLES / "mux.py", "127.0.0.1:0"]

        def hear():
            """Whoever runs this in the background has it ignored."""
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

    def test_the_example_decides_as_the_inspector_in_rust(self):
        rules = OFFICE / "office.ipfw"
        ours = self.replay(rules, f"{sys.executable} -B {EXAMPLES / 'inspector.py'} password=")["queues"][0]
        peers = self.replay(rules, "towpath inspect --queue 1 --match password= --verdict drop")["queues"][0]
        self.assertGreater(ours["dropped"], 0)
        for key in ("frames", "passed", "dropped", "lost"):
            self.assertEqual(ours[key], peers[key], key)


if __name__ == "__main__":
    parts(sys.argv[1])
