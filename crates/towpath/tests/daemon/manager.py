"""A stand-in for systemd as the service manager of one program: NOTIFY_SOCKET, WATCHDOG_USEC, LISTEN_FDS and FDSTORE.

Usage: manager.py DIRECTORY [--listen NAME=HOST:PORT]... [--watchdog USEC] -- PROGRAM ARGUMENT...

Reads commands from standard input, one a line, and writes events to standard output, one JSON object a line.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1
PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH = 0x4206, 0x4207, 17


def tell(**event):
    print(json.dumps(event), flush=True)


class Manager:
    def __init__(self, arguments):
        split = arguments.index("--")
        options, self.program = arguments[1:split], arguments[split + 1 :]
        self.watchdog, self.made, self.store = None, [], []
        for option, value in zip(options[::2], options[1::2]):
            if option == "--watchdog":
                self.watchdog = value
            else:
                name, address = value.split("=")
                host, port = address.rsplit(":", 1)
                self.made.append((name, socket.create_server((host, int(port)))))
        self.path = os.path.join(os.path.abspath(arguments[0]), "notify")
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.bind(self.path)
        os.chmod(self.path, 0o777)
        self.pid = None

    def start(self):
        passed = self.made + self.store
        pid = os.fork()
        if pid == 0:
            numbers = [os.dup(fd.fileno()) for _, fd in passed]
            # Above the numbers that the program gets.
            high = [os.dup2(number, 100 + at) for at, number in enumerate(numbers)]
            os.closerange(3, 100)
            for at, number in enumerate(high):
                os.dup2(number, 3 + at, inheritable=True)
            os.closerange(3 + len(high), 200)
            os.environ.update(NOTIFY_SOCKET=self.path, FDSTORE="64")
            if passed:
                names = ":".join(name for name, _ in passed)
                os.environ.update(LISTEN_FDS=str(len(passed)), LISTEN_FDNAMES=names, LISTEN_PID=str(os.getpid()))
            if self.watchdog:
                os.environ.update(WATCHDOG_USEC=self.watchdog, WATCHDOG_PID=str(os.getpid()))
            os.dup2(2, 1)
            # A test that fails kills the manager.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.execv(self.program[0], self.program)
        self.pid = pid
        tell(started=pid, passed=[name for name, _ in passed])

    def receive(self):
        text, fds, _, _ = socket.recv_fds(self.notify, 4096, 16, socket.MSG_DONTWAIT)
        state = dict(line.split("=", 1) for line in text.decode().splitlines())
        if state.get("FDSTORE") == "1":
            self.store += [(state["FDNAME"], socket.socket(fileno=fd)) for fd in fds]
        if state.get("FDSTOREREMOVE") == "1":
            self.store = [kept for kept in self.store if kept[0] != state["FDNAME"]]
        tell(notify=state, fds=len(fds))

    def thread(self, name):
        for thread in os.listdir(f"/proc/{self.pid}/task"):
            with open(f"/proc/{self.pid}/task/{thread}/comm") as comm:
                if comm.read().strip() == name:
                    return int(thread)
        raise LookupError(name)

    def trace(self, request, thread):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.ptrace(request, thread, None, None) != 0:
            raise OSError(ctypes.get_errno(), "ptrace")

    def command(self, words):
        match words:
            case ["start"]:
                self.start()
            case ["signal", name]:
                os.kill(self.pid, signal.Signals[name])
            case ["wait"]:
                _, status = os.waitpid(self.pid, 0)
                while select.select([self.notify], [], [], 0)[0]:
                    self.receive()
                tell(exit=os.waitstatus_to_exitcode(status))
            case ["hang", name]:
                thread = self.thread(name)
                self.trace(PTRACE_SEIZE, thread)
                self.trace(PTRACE_INTERRUPT, thread)
                os.waitpid(thread, 0x40000000)
                tell(hung=name)
            case ["release", name]:
                self.trace(PTRACE_DETACH, self.thread(name))
                tell(released=name)
            case ["mark"]:
                tell(mark=True)

    def run(self):
        rest = b""
        while True:
            ready, _, _ = select.select([self.notify, 0], [], [])
            if self.notify in ready:
                self.receive()
            elif 0 in ready:
                read = os.read(0, 4096)
                if not read:
                    break
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    self.command(line.decode().split())
        # The test has ended, perhaps by a failure.
        if self.pid:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


Manager(sys.argv[1:]).run()
