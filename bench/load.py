# SPDX-License-Identifier: 0BSD
"""The load: prebuilt frames on raw sockets and one epoll, so that the server is what is measured, not the client.

Each session plays without a pause: it sends its next message when the reply to the last one is there. Every reply is
compared, byte for byte, with one that was checked before. While it waits, the load polls without sleeping: the server
would pay for each wake-up of a client on the same machine. `python load.py PORT` is the peer that the load itself is
measured against: it only reads and writes.
"""

import itertools
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

Figures = dict[str, float]

MESSAGES = b'{"type":"reset","data":{}}', b'{"type":"step","data":{"message":"hello"}}'
AT_ONCE = 64  # handshakes at once while sessions are opened
PATIENCE = 60  # seconds without any answer after which the load gives up
WARM_UP = 0.1  # seconds
MASK = b"\x37\xfa\x21\x3d"  # any other does as well: servers unmask every frame in the same way
clock = time.perf_counter


def frame(opcode: int, payload: bytes) -> bytes:
    """A client's frame of less than 126 bytes."""
    masked = bytes(byte ^ MASK[n % 4] for n, byte in enumerate(payload))
    return bytes((0x80 | opcode, 0x80 | len(payload))) + MASK + masked


RESET, STEP, CLOSE = frame(1, MESSAGES[0]), frame(1, MESSAGES[1]), frame(8, b"\x03\xe8")
CLOSED = b"\x88\x02\x03\xe8"
UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAECAwQFBgcICQoLDA0ODw==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
UPGRADED = b"HTTP/1.1 101 "


# ---- The sessions ----------------------------------------------------------------------------------------------------


class Server(NamedTuple):
    """A server on this machine. `replies` maps each request to the frame that answers it, or to the start of it."""

    port: int
    pid: int
    replies: dict[bytes, bytes]


def connect(port: int, number: int = 0) -> socket.socket:
    """A connected socket. The number spreads them over several source addresses, each of which has 28,000 ports."""
    sock = socket.socket()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT: the port is chosen when it connects
    sock.bind((f"127.0.0.{2 + number % 8}", 0))
    sock.settimeout(PATIENCE)
    sock.connect(("127.0.0.1", port))
    return sock


def first_episode(port: int, echo: bool) -> dict[bytes, bytes]:
    """Plays one episode, checks what the replies say, and returns them. An echo must send back what it gets."""
    replies = {UPGRADE: UPGRADED, CLOSE: CLOSED}
    with connect(port) as sock:
        for request in (UPGRADE, RESET, STEP, CLOSE):
            sock.sendall(request)
            reply = sock.recv(65536)
            if request in (RESET, STEP):
                payload = reply[4 if reply[1:2] == b"\x7e" else 2 :]
                reward, done = (0.5, True) if request == STEP else (None, False)
                data = {} if echo else json.loads(payload)["data"]
                good = payload in MESSAGES if echo else (data["reward"], data["done"]) == (reward, done)
                replies[request] = reply
            else:
                good = reply.startswith(replies[request])
            if not good:
                raise ValueError(f"unexpected answer to {request!r}: {reply!r:.300}")
    return replies


class Session:
    """One socket: its request that waits for the reply, or b""; since when; and what is there of the reply."""

    __slots__ = ("request", "rest", "sent_at", "sock")

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock, self.request, self.rest, self.sent_at = sock, b"", b"", 0.0


class Load:
    """All sessions with one server. `idle` sums up the seconds in which the load had nothing to do but to wait."""

    def __init__(self, server: Server) -> None:
        self.server, self.replies = server, server.replies
        self.sessions: dict[int, Session] = {}
        self.epoll = select.epoll()
        self.numbers = itertools.count()
        self.waiting, self.idle = 0, 0.0

    def ask(self, session: Session, request: bytes) -> None:
        """Sends a request of a session that waits for nothing."""
        self.waiting += 1
        session.request, session.sent_at = request, clock()
        session.sock.send(request)

    def begin(self) -> None:
        """Adds a session, which asks for the upgrade."""
        session = Session(connect(self.server.port, next(self.numbers)))
        self.sessions[session.sock.fileno()] = session
        self.epoll.register(session.sock, select.EPOLLIN)
        self.ask(session, UPGRADE)

    def drop(self, session: Session, request: bytes = CLOSE) -> None:
        """Ends a session whose closing handshake is done."""
        del self.sessions[session.sock.fileno()]
        session.sock.close()

    def collect(self, answered: Callable[[Session, bytes], None]) -> None:
        """Reads until no session waits. Calls `answered` with each session whose reply is there, and the request."""
        while self.waiting:
            events = self.epoll.poll(0)
            if not events:
                since = clock()
                while not events and clock() - since < PATIENCE:
                    events = self.epoll.poll(0)
                self.idle += clock() - since
            if not events:
                raise TimeoutError(f"no answer in {PATIENCE} s: {self.waiting} of {len(self.sessions)} sessions wait")
            for fd, _ in events:
                session = self.sessions[fd]
                data, request = session.sock.recv(65536), session.request
                if (not session.rest and data == self.replies.get(request)) or self.completes(session, data):
                    session.request = b""
                    self.waiting -= 1
                    answered(session, request)

    def completes(self, session: Session, data: bytes) -> bool:
        """Takes what is not just one whole reply: answers pings, and says whether the reply is whole now."""
        rest, expected, whole = session.rest + data, self.replies.get(session.request, b""), False
        if session.request == UPGRADE and rest.startswith(expected):
            expected = rest.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        while rest:
            if rest[:1] == b"\x89" and rest[1:] and len(rest) >= 2 + rest[1]:
                session.sock.send(frame(10, rest[2 : 2 + rest[1]]))
                rest = rest[2 + rest[1] :]
            elif expected and not whole and rest.startswith(expected):
                whole, rest = True, rest[len(expected) :]
            else:
                break
        if not data or not (rest[:1] == b"\x89" or (b"" if whole else expected).startswith(rest)):
            raise ConnectionError(f"unexpected answer to {session.request!r}: {rest!r:.300}")
        session.rest = rest
        return whole

    def open(self, total: int) -> None:
        """Adds sessions until there are `total`."""

        def answered(session: Session, request: bytes) -> None:
            if len(self.sessions) < total:
                self.begin()

        for _ in range(min(AT_ONCE, total - len(self.sessions))):
            self.begin()
        self.collect(answered)

    def ask_all(self, request: bytes, sparing: int = 0) -> None:
        """Sends one request of every session but the first `sparing`, and waits for all replies."""
        for session in list(self.sessions.values())[sparing:]:
            self.ask(session, request)
        self.collect(self.drop if request == CLOSE else lambda session, request: None)

    def usage(self) -> tuple[float, float, float]:
        """The time, the load's idle time, and the processor time of the server, all in seconds."""
        return clock(), self.idle, processor_time(self.server.pid)


def processor_time(pid: int) -> float:
    """What a process has used of its core, in seconds."""
    with open(f"/proc/{pid}/stat") as file:
        ticks = file.read().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """The memory of a process in bytes."""
    with open(f"/proc/{pid}/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmRSS"))


# ---- What is measured ------------------------------------------------------------------------------------------------


def figures(load: Load, count: int, until: float, before: tuple[float, float, float]) -> Figures:
    """The rate of what was counted `until` then, and the shares of their cores that load and server took."""
    took, idle, used = (now - then for now, then in zip(load.usage(), before, strict=True))
    rate = count / (until - before[0])
    return {"rate": rate, "load": 1 - idle / took, "server": used / took, "cost": 1e6 * used / count}


def play(load: Load, count: int, seconds: float) -> Figures:
    """Alternates reset and step in the first `count` sessions: messages per second, and their latency in ms."""
    latencies: list[float] = []
    deadline = last = 0.0

    def answered(session: Session, request: bytes) -> None:
        nonlocal last
        now = clock()
        if now < deadline or len(latencies) < count:  # the latter for a server that got no processor time
            last = now
            latencies.append(now - session.sent_at)
            load.ask(session, RESET if request == STEP else STEP)

    for limit in (WARM_UP, seconds):
        latencies.clear()
        before = load.usage()
        deadline = clock() + limit
        for session in list(load.sessions.values())[:count]:
            load.ask(session, RESET)
        load.collect(answered)
    result = figures(load, len(latencies), last, before)
    latencies.sort()
    return result | {key: 1000 * latencies[int(len(latencies) * part)] for key, part in (("p50", 0.50), ("p99", 0.99))}


def steps(server: Server, sessions: int, seconds: float) -> Figures:
    """Plays in so many sessions: messages per second and their latency."""
    load = Load(server)
    load.open(sessions)
    result = play(load, sessions, seconds)
    load.ask_all(CLOSE)
    return result


def episodes(server: Server, concurrency: int, seconds: float) -> Figures:
    """Whole sockets per second: connect, opening handshake, reset, step, closing handshake; then the next one."""
    load, ended, last = Load(server), 0, 0.0
    following = {UPGRADE: RESET, RESET: STEP, STEP: CLOSE}

    def answered(session: Session, request: bytes) -> None:
        nonlocal ended, last
        if request != CLOSE:
            return load.ask(session, following[request])
        load.drop(session)
        now = clock()
        if now < deadline or ended < concurrency:
            ended, last = ended + 1, now
            load.begin()

    before = load.usage()
    deadline = clock() + seconds
    for _ in range(concurrency):
        load.begin()
    load.collect(answered)
    return figures(load, ended, last, before)


def held(server: Server, sessions: int) -> Figures:
    """The memory of each of so many sessions, all in the middle of an episode, in bytes."""
    load, before = Load(server), resident(server.pid)
    load.open(sessions)
    load.ask_all(RESET)
    result = {"bytes": (resident(server.pid) - before) / sessions}
    load.ask_all(CLOSE)
    return result


def crowd(server: Server, idle: int, total: int, seconds: Iterable[float]) -> Figures:
    """64 sessions alone, beside `idle` idle ones, and alone again; between them, `total` sessions play at once."""
    load = Load(server)
    alone, beside = seconds
    load.open(64)
    first = play(load, 64, alone)["p99"]
    load.open(64 + idle)
    crowded = play(load, 64, beside)["p99"]
    load.open(total)
    started = clock()
    load.ask_all(RESET)
    load.ask_all(STEP)
    took, bytes_ = clock() - started, resident(server.pid)
    load.ask_all(CLOSE, sparing=64)
    mean = (first + play(load, 64, alone)["p99"]) / 2
    load.ask_all(CLOSE)
    return {
        "total": total,
        "idle": idle,
        "took": took,
        "bytes": bytes_,
        "alone": mean,
        "beside": crowded,
        "ratio": crowded / mean,
    }


# ---- The peer that the load is measured against ----------------------------------------------------------------------


def bare_peer(port: int) -> None:
    """Answers each request, which it does not parse, by a prebuilt frame."""
    answers = {UPGRADE: UPGRADED + b"Switching Protocols\r\n\r\n", CLOSE: CLOSED}
    answers |= {frame(1, message): bytes((0x81, len(message))) + message for message in MESSAGES}
    listener = socket.create_server(("127.0.0.1", port), backlog=1024)
    socks = {listener.fileno(): listener}
    epoll = select.epoll()
    epoll.register(listener, select.EPOLLIN)
    while True:
        for fd, _ in epoll.poll():
            if fd == listener.fileno():
                sock = listener.accept()[0]
                socks[sock.fileno()] = sock
                epoll.register(sock, select.EPOLLIN)
            elif data := socks[fd].recv(65536):
                socks[fd].send(answers[data])
            else:
                socks.pop(fd).close()


if __name__ == "__main__":
    bare_peer(int(sys.argv[1]))
