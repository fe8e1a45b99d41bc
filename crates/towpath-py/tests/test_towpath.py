"""The module towpath. tests/python.rs runs this with the module in PYTHONPATH and the command line in TOWPATH."""

import ast
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import unittest

import towpath
from towpath import Inspector, Verdict, Worker

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
    workers = {"iterate": iterate, "receive": receive, "interrupted": interrupted, "checked": checked}
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
        for part in ("iterate", "receive", "interrupted", "checked"):
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
