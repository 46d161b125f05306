# SPDX-License-Identifier: 0BSD
"""Tests of server.py on real sockets: first the wire contract, section by section, then what a server must withstand.

`python -m unittest test_server` runs them. Variables: LEAK_EPISODES (2000), FUZZ_SECONDS (3) and FUZZ_SEED (1).
"""

import asyncio
import base64
import collections
import contextlib
import datetime
import io
import itertools
import json
import os
import pathlib
import pty
import random
import re
import resource
import runpy
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import websockets
from websockets.asyncio.server import ServerConnection, serve

import replay
import server

MIB = 2**20
LIMIT = 16 * MIB  # of one message
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10  # opcodes
CUT = (None, "")  # what `ended` gives for a connection that was cut without a close frame
PROC = unittest.skipUnless(os.path.exists("/proc/self/status"), "needs Linux's /proc")
USER_TIMEOUT = unittest.skipUnless(hasattr(socket, "TCP_USER_TIMEOUT"), "this platform has no TCP_USER_TIMEOUT")


def setUpModule():
    """Some tests open thousands of sockets."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# ---- Helpers: a server here or in a process of its own, a client by the library or by hand ---------------------------


class Case(unittest.IsolatedAsyncioTestCase):
    """A test that fails, too, when anything in this process logs a warning or an error that it did not expect."""

    def setUp(self):
        self.enterContext(self.assertNoLogs(level="WARNING"))

    async def asyncSetUp(self):
        asyncio.get_running_loop().set_debug(False)  # unittest sets it; it is slow

    def skip(self, why):
        print(f"\nSKIPPED {self.id()}: {why}", file=sys.stderr)
        self.skipTest(why)


def environment(script=None, asynchronous=False):
    """A `new_episode`. A handler's entry in the script is called, raised or returned; else it does the plainest thing.

    The script may change while the environments live.
    """
    script = {} if script is None else script

    def handler(name, default):
        def call(*args):
            answer = script.get(name, default)
            if isinstance(answer, BaseException):
                raise answer
            return answer(*args) if callable(answer) else answer

        async def call_later(*args):
            await asyncio.sleep(0)
            answer = call(*args)
            return await answer if asyncio.iscoroutine(answer) else answer

        return call_later if asynchronous else call

    plain = {
        "reset": lambda data: server.observation({}),
        "step": lambda action: server.observation({"action": action}, 1.0),
        "state": dict,
        "close": lambda: None,
    }
    return lambda: {name: handler(name, default) for name, default in plain.items()}


@contextlib.asynccontextmanager
async def serving(new_episode=server.null_episode, **options):
    """A server in this process; gives its port."""
    async with server.serve_episodes(new_episode, port=0, **options) as running:
        yield running.sockets[0].getsockname()[1]


PRELUDE = """
import asyncio, functools, inspect, resource, socket, sys, time, websockets.asyncio.server as library

def speed(function, **factors):
    @functools.wraps(function)
    def call(*args, **options):
        bound = inspect.signature(function).bind(*args, **options)
        bound.apply_defaults()
        for name in bound.arguments.keys() & factors.keys():
            if bound.arguments[name] is not None:
                bound.arguments[name] *= factors[name]
        return function(*bound.args, **bound.kwargs)
    return call

def clocks(user_timeout=1, **factors):  # multiplies times, wherever server.py has them from
    library.serve, asyncio.wait = speed(library.serve, **factors), speed(asyncio.wait, **factors)
    original = socket.socket.setsockopt
    def setsockopt(sock, level, option, *value):
        is_timeout = (level, option) == (socket.IPPROTO_TCP, getattr(socket, "TCP_USER_TIMEOUT", None))
        original(sock, level, option, *([int(value[0] * user_timeout)] if is_timeout else value))
    socket.socket.setsockopt = setsockopt

def plug(**handlers):  # another environment
    import server
    def new_episode():
        plain = {"reset": lambda data: server.observation({}), "step": lambda action: server.observation({}, 1.0)}
        return plain | handlers
    original = server.serve_episodes
    server.serve_episodes = lambda _, **options: original(new_episode, **options)
"""


class Program:
    """server.py in a process of its own: `async with Program("--flag=1", VARIABLE="x") as program:`, until it listens.

    `code` runs before its main(); see PRELUDE. `within` is a command to run it in.
    """

    def __init__(self, *flags, code=None, within=(), ready="listening on ws://", **variables):
        how = [server.__file__] if code is None else ["-c", f"{PRELUDE}\n{code}\nimport server\nserver.main()"]
        self.command, self.ready, self.log = [*within, sys.executable, *how, *flags], ready, []
        ours = {"PORT", "MAX_CONCURRENT_ENVS", "SERVER_TOKEN"}
        env = {key: value for key, value in os.environ.items() if key not in ours} | variables
        self.options = {"env": env, "cwd": os.path.dirname(os.path.abspath(server.__file__)), "start_new_session": True}

    async def __aenter__(self):
        options = self.options | {"stderr": subprocess.PIPE, "limit": 2**30}  # so that it is read all the time
        self.process = await asyncio.create_subprocess_exec(*self.command, **options)
        self.pid = self.process.pid
        try:
            self.port = int((await self.line(self.ready)).split("/ws")[0].rpartition(":")[2])
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # with its workers
        await self.process.communicate()

    async def line(self, text):
        """The next log line with this text, as soon as it is there."""
        async with asyncio.timeout(20):
            while text not in (line := (await self.process.stderr.readline()).decode()):
                self.log.append(line)
                assert line, f"no line with {text!r} in the log:\n{''.join(self.log)}"
            self.log.append(line)
        return line

    async def end(self, *signals):
        """The exit status, after these signals; then `log` has all lines."""
        for number in signals:
            self.process.send_signal(number)
        async with asyncio.timeout(10):
            self.log += (await self.process.stderr.read()).decode().splitlines()
            return await self.process.wait()

    def output(self):
        """Exit status, stdout and stderr of a command line that ends by itself."""
        ended = subprocess.run(self.command, **self.options, check=False, capture_output=True, text=True, timeout=20)
        return ended.returncode, ended.stdout, ended.stderr

    def proc(self, name):
        """The words of a line of this process's /proc/PID/status or limits."""
        text = "".join(pathlib.Path(f"/proc/{self.pid}/{file}").read_text() for file in ("status", "limits"))
        return next(line for line in text.splitlines() if line.startswith(name)).split()

    def memory(self):
        """Resident bytes."""
        return 1024 * int(self.proc("VmRSS")[1])


def connect(port, path="/ws", host="127.0.0.1", **options):
    """A client of the websockets library; to be awaited or entered."""
    options = {"proxy": None, "max_size": None, "ping_interval": None, "close_timeout": 1} | options
    return websockets.connect(f"ws://{host}:{port}{path}", **options)


def strict(text):
    """The value of a reply's JSON text. NaN and Infinity, which are no JSON, and a binary frame fail."""
    assert isinstance(text, str), f"{text!r} is no text frame"
    return json.loads(text, parse_constant=lambda name: unittest.TestCase().fail(f"{name} is not JSON"))


def message(kind, data=None):
    return json.dumps({"type": kind} if data is None else {"type": kind, "data": data})


async def ask(ws, text):
    """The reply to a message."""
    async with asyncio.timeout(10):
        await ws.send(text)
        return strict(await ws.recv())


async def rpc(ws, kind, data=None):
    """The `data` of the reply to a request, which must not be an error."""
    reply = await ask(ws, message(kind, data))
    assert reply["type"] == ("state" if kind == "state" else "observation"), reply
    return reply["data"]


async def code_of(ws, kind, data=None):
    """The error code of the reply to a request."""
    return (await ask(ws, message(kind, data)))["data"].get("code")


async def play(ws):
    """Plays one whole episode of the null environment."""
    reset, step = await rpc(ws, "reset", {"task_id": "null"}), await rpc(ws, "step", {"answer": 1})
    assert (reset["done"], step["reward"], step["done"]) == (False, 0.5, True), (reset, step)


async def ended(ws):
    """Reads until the socket ends; gives the close code and reason that the server sent, or CUT."""
    try:
        async with asyncio.timeout(10):
            while True:
                await ws.recv()
    except websockets.ConnectionClosed as exc:
        return (exc.rcvd.code, exc.rcvd.reason) if exc.rcvd else CUT


def cut(ws):
    """Ends a TCP connection with a reset, as the kernel of a killed client may."""
    if not ws.transport.is_closing():
        ws.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ws.transport.abort()


async def wait(event):
    async with asyncio.timeout(10):
        await event.wait()


async def until(condition):
    """Waits for what no event tells."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


async def raw(port, *parts, eof=False):
    """Sends bytes, each part in a TCP segment of its own; gives what comes until the server closes, or upgrades."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = b""
    with contextlib.suppress(ConnectionError):  # the server may close before it has read all of it
        async with asyncio.timeout(10):
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.01 if len(parts) > 1 else 0)
            if eof:
                writer.write_eof()
            while b" 101 " not in got[:20] and (chunk := await reader.read(2**16)):
                got += chunk
    cut(writer)
    return got


KEY = base64.b64encode(bytes(16)).decode()
UPGRADE = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {KEY}")
Answer = collections.namedtuple("Answer", "status headers body")


def head(method, path, *headers):
    """The bytes of an HTTP request."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]).encode("latin-1")


def parse(response):
    top, _, body = response.partition(b"\r\n\r\n")
    status, *lines = top.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Answer(int(status.split()[1]) if status else None, headers, body)


async def http(port, method, path, *headers):
    """The answer to an HTTP request."""
    return parse(await raw(port, head(method, path, *headers)))


async def sessions(port):
    return json.loads((await http(port, "GET", "/health")).body)["active_sessions"]


async def no_sessions(port):
    async with asyncio.timeout(10):
        while await sessions(port):
            await asyncio.sleep(0.02)


def frame(payload=b"", opcode=TEXT, fin=True, mask=True, rsv=0):
    """The bytes of a client's frame, right or wrong; RFC 6455, section 5.2. The masking key is zero."""
    payload = payload.encode() if isinstance(payload, str) else payload
    size, bit = len(payload), 128 * mask
    length = struct.pack("!B", bit | size) if size < 126 else struct.pack("!BH", bit | 126, size % 2**16)
    length = length if size < 2**16 else struct.pack("!BQ", bit | 127, size)
    return bytes([128 * fin | rsv << 4 | opcode]) + length + bytes(4 * mask) + payload


OVERSIZE = frame(bytes(LIMIT + 1))[:14]  # a header is enough


class Wire:
    """A WebSocket client by hand: it answers no ping and no close, and reads only when told."""

    @classmethod
    async def open(cls, port):
        self = cls()
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
        self.transport, self.send = self.writer.transport, self.writer.write
        self.send(head("GET", "/ws", *UPGRADE))
        async with asyncio.timeout(10):
            answer = parse(await self.reader.readuntil(b"\r\n\r\n"))
        assert answer.status == 101, answer
        return self

    async def frame(self):
        """Opcode and payload of the next frame. Raises IncompleteReadError or ConnectionError at the end."""
        async with asyncio.timeout(10):
            first, size = await self.reader.readexactly(2)
            if size > 125:
                size = int.from_bytes(await self.reader.readexactly(2 if size == 126 else 8))
            return first & 15, await self.reader.readexactly(size)

    async def reply(self):
        """The next reply, past pings and pongs; or the close code; or None where the connection was cut."""
        try:
            while (opcode := (got := await self.frame())[0]) in (PING, PONG):
                pass
            return strict(got[1].decode()) if opcode == TEXT else int.from_bytes(got[1][:2])
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def ask(self, kind, data=None):
        self.send(frame(message(kind, data)))
        return await self.reply()

    async def stuff(self, data, most):
        """Sends `data` again and again, and reads nothing, until nothing moves any more or `most` bytes are sent."""
        self.transport.pause_reading()
        self.transport.set_write_buffer_limits(high=0)
        with contextlib.suppress(TimeoutError):
            for sent in range(len(data), most, len(data)):  # noqa: B007
                async with asyncio.timeout(1):
                    self.send(data)
                    await self.writer.drain()
        return sent


# ---- The wire contract, by its sections ------------------------------------------------------------------------------


class OneSocketOneSession(Case):
    async def test_sockets_share_nothing(self):
        made = []
        new_episode = lambda: made.append(1) or server.null_episode()
        async with serving(new_episode) as port, connect(port) as one, connect(port) as two:
            for ws, name in [(one, "one"), (two, "two")]:
                await play(ws)  # an earlier episode on the same socket
                await rpc(ws, "reset", {"episode_id": name})
            await rpc(one, "step", {})
            for ws, name, steps in [(one, "one", 1), (two, "two", 0)]:
                state = await rpc(ws, "state")
                self.assertEqual((state["episode_id"], state["step_count"]), (name, steps))
            self.assertEqual((await rpc(two, "step", {}))["reward"], 0.5)
        self.assertEqual(made, [1, 1])

    async def test_binary_frames_and_fragments_are_messages_like_any(self):
        text = '{"type": "step", "data": {"word": "größer"}}'
        async with serving(environment()) as port, connect(port) as ws:
            await rpc(ws, "reset")
            for form in (text, text.encode(), [text[:9], text[9:]], [text.encode()[:37], text.encode()[37:]]):
                with self.subTest(form):
                    reply = await ask(ws, form)  # which wants a text frame
                    self.assertEqual(reply["data"]["observation"], {"action": {"word": "größer"}})

    async def test_pipelined_requests_get_one_reply_each_in_order(self):
        async def step(action):
            await asyncio.sleep(0.002 * (action["n"] % 3))  # a later one could overtake
            return server.observation(action)

        sent, wanted = [], []
        for n in range(100):
            wrong = n % 2 == 0
            sent += [message("step", {"n": n}), "garbage" if wrong else message("state")]
            wanted += [("observation", n), ("error", None) if wrong else ("state", n + 1)]
        async with serving(environment({"step": step})) as port, connect(port) as ws:
            for text in (message("reset"), *sent, message("close")):
                await ws.send(text)
            async with asyncio.timeout(10):
                replies = [strict(text) async for text in ws]
        got = [(r["type"], r["data"].get("observation", {}).get("n", r["data"].get("step_count"))) for r in replies]
        self.assertEqual(got, [("observation", None), *wanted])

    async def test_close_has_no_reply_and_ends_the_socket_with_1000(self):
        for before in ([], ["reset"], ["reset", "step"]):
            with self.subTest(before=before):
                async with serving() as port, connect(port) as ws:
                    for kind in before:
                        await rpc(ws, kind, {})
                    await ws.send(message("close"))
                    if before:
                        await ws.send(message("state"))  # too late for a reply
                    with self.assertRaises(websockets.ConnectionClosedOK) as end:
                        await ws.recv()
                    self.assertEqual(end.exception.rcvd.code, 1000)


class Requests(Case):
    async def test_valid_requests(self):
        resets = [
            {}, {"task_id": "null"}, {"task_id": None, "seed": None, "episode_id": None}, {"seed": 0}, {"seed": 10**100},
            {"episode_id": "x" * 255}, {"episode_id": ""}, {"prompt": [{"role": "user"}], "answer": 3, "": None},
        ]  # fmt: skip
        action = {"type": "close", "a": [None, 1e308, "\ud800", {"": {}}]}
        table = [(message("reset", data), "observation") for data in (None, *resets)]
        table += [(' \r\n\t{"data": {}, "type": "reset"}\n', "observation"), (r'{"type":"\u0072eset"}', "observation")]
        table += [(message("state"), "state"), (message("step", action), "observation"), (message("state"), "state")]
        async with serving() as port, connect(port) as ws:
            for text, kind in table:
                with self.subTest(text):
                    self.assertEqual((await ask(ws, text))["type"], kind)

    async def test_reset_and_step_get_their_data_as_it_came(self):
        got = []
        keep = lambda data: got.append(data) or server.observation({})
        sent = [{"task_id": "t", "seed": 3, "episode_id": "e", "row": {"x": [1, None]}}, {"a": {"b": [1.5, True, "ü"]}}]
        async with serving(environment({"reset": keep, "step": keep})) as port, connect(port) as ws:
            await rpc(ws, "reset", sent[0])
            await rpc(ws, "step", sent[1])
        self.assertEqual(got, sent)


class Replies(Case):
    async def test_shapes(self):
        observed = {"observation": dict, "reward": float, "done": bool}
        async with serving() as port, connect(port) as ws:
            for text, kind, types in [
                (message("state"), "state", {"episode_id": type(None), "step_count": int}),
                (message("reset"), "observation", observed | {"reward": type(None)}),
                (message("state"), "state", {"episode_id": str, "step_count": int}),
                (message("step", {}), "observation", observed),
                (message("step"), "error", {"message": str, "code": str, "errors": list}),
                ("", "error", {"message": str, "code": str}),
            ]:
                with self.subTest(text):
                    reply = await ask(ws, text)
                    self.assertEqual((reply["type"], reply.keys()), (kind, {"type", "data"}))
                    extra = reply["data"].keys() - types.keys() if kind == "state" else ()  # an environment may add
                    self.assertEqual({k: type(v) for k, v in reply["data"].items() if k not in extra}, types)

    async def test_metadata_is_there_only_when_given(self):
        for given, shown in [({"turn": 1}, {"turn": 1}), (None, None), ({}, None)]:
            script = {"reset": server.observation({}, metadata=given)}
            async with serving(environment(script)) as port, connect(port) as ws:
                self.assertEqual((await rpc(ws, "reset")).get("metadata"), shown)


def resets(key, *values):
    return [(f'{{"type": "reset", "data": {{"{key}": {value}}}}}', key) for value in values]


WRONG = {  # by code: texts, with the wrong key where there is one
    "INVALID_JSON": [(text, None) for text in (
        "", " ", "{", "{}{}", '{"type": "reset"}\n{"type": "reset"}', "reset", "{'type': 'reset'}", '{"type": "reset",}',
        '{"type": "step", "data": {"x": NaN}}', '{"type": "step", "data": {"x": [Infinity]}}', "-Infinity",
        '\ufeff{"type": "reset"}', '{"type": "re\nset"}', "[" * 100_000, '{"a":' * 100_000,
        '{"type": "step", "data": {"x": ' + "9" * 10_000 + "}}",
        b"", b"\xff", b'{"type": "re\xe4set"}', b'{"type": "\xed\xa0\x80"}', '{"type": "reset"}'.encode("utf-16"),
    )],
    "UNKNOWN_TYPE": [(text, None) for text in (
        "{}", '{"data": {}}', '{"type": null}', '{"type": 1}', '{"type": ["reset"]}', '{"type": {"reset": 1}}',
        '{"type": ""}', '{"type": "RESET"}', '{"type": "reset "}', '{"type": "mcp", "data": {}}', '{"Type": "reset"}',
    )],
    "VALIDATION_ERROR": [
        *((text, None) for text in ("[]", "null", "1", "-1.5", "true", '"reset"', '[{"type": "reset"}]')),
        ('{"type": "reset", "x": 1}', "x"), ('{"type": "reset", "data": {}, "task_id": "null"}', "task_id"),
        ('{"type": "step", "data": {}, "": 1}', ""), ('{"type": "state", "data": {}}', "data"),
        ('{"type": "close", "data": {}}', "data"), ('{"type": "close", "x": 1}', "x"), ('{"type": "step"}', "data"),
        *((f'{{"type": "{kind}", "data": {value}}}', "data")
          for kind in ("step", "reset") for value in ("null", "[]", "[1]", '"x"', "0", "false")),
        *resets("task_id", "1", "true", "[]", "{}", '""', '"NULL"', '"nope"'),
        *resets("seed", "-1", "1.5", "1e3", "true", '"1"', "[]", "{}"),
        *resets("episode_id", "1", "true", "[]", "{}", '"' + "x" * 256 + '"'),
    ],
}  # fmt: skip


class Errors(Case):
    async def refused(self, ws, text, code):
        """Sends a wrong message; it must be refused in the contract's form, and change nothing."""
        before = await rpc(ws, "state")
        reply = await ask(ws, text)
        data = reply["data"]
        self.assertEqual((reply["type"], data.get("code")), ("error", code), reply)
        self.assertGreater(len(data["message"]), 15)
        self.assertEqual("errors" in data, code == "VALIDATION_ERROR")
        for entry in data.get("errors", ()):
            self.assertEqual((type(entry["loc"]), type(entry["msg"]), len(entry)), (list, str, 2))
        self.assertEqual(await rpc(ws, "state"), before)
        return data

    async def test_wrong_messages_in_every_phase_of_an_episode(self):
        async with serving() as port, connect(port) as ws:
            for phase in (None, "reset", "step"):
                if phase:
                    await rpc(ws, phase, {})
                for code, table in WRONG.items():
                    for text, key in table:
                        with self.subTest(code, phase=phase, text=text[:80]):
                            data = await self.refused(ws, text, code)
                            if key is not None:
                                self.assertEqual(data["errors"][0]["loc"][-1], key)
            await play(ws)

    async def test_messages_say_what_is_wrong_and_what_would_be_right(self):
        async with serving() as port, connect(port) as ws:
            table = [
                ("{", "INVALID_JSON", "JSON"),
                ('{"type": "stpe"}', "UNKNOWN_TYPE", "stpe", "reset", "step", "state", "close"),
                ("[]", "VALIDATION_ERROR", "object"),
                ('{"type": "state", "wrong": 1}', "VALIDATION_ERROR", "wrong", "type"),
                (message("step"), "VALIDATION_ERROR", "data", "object"),
                (message("reset", {"task_id": 7}), "VALIDATION_ERROR", "task_id", "string"),
                (message("reset", {"task_id": "nope"}), "VALIDATION_ERROR", "nope", "null"),
                (message("reset", {"seed": -1}), "VALIDATION_ERROR", "seed", "integer", "0"),
                (message("reset", {"episode_id": 0}), "VALIDATION_ERROR", "episode_id", "string", "255"),
                (message("step", {}), "EXECUTION_ERROR", "reset"),
            ]
            for phase, (text, code, *words) in itertools.product(("before the first reset", "after done"), table):
                if phase == "after done":
                    await play(ws)
                with self.subTest(phase, text=text):
                    said = (await self.refused(ws, text, code))["message"]
                    self.assertEqual([word for word in words if word not in said], [])

    async def test_capacity_reached(self):
        async with serving(max_sessions=1) as port, connect(port) as ws, connect(port) as second:
            async with asyncio.timeout(10):
                data = strict(await second.recv())["data"]  # sent at once, without a request
            self.assertEqual((data["code"], data["active_sessions"], data["max_sessions"]), ("CAPACITY_REACHED", 1, 1))
            self.assertEqual((await ended(second))[0], 1013)
            await play(ws)

    async def test_factory_error(self):
        for failure in (RuntimeError("no GPU left"), SystemExit("no GPU left")):
            with self.subTest(failure), self.assertLogs(level="ERROR") as log:
                async with serving(unittest.mock.Mock(side_effect=failure), max_sessions=1) as port:
                    for _ in range(2):  # the first one left no session behind
                        async with connect(port) as ws, asyncio.timeout(10):
                            data = strict(await ws.recv())["data"]
                            self.assertEqual((await ended(ws))[0], 1011)
                        self.assertEqual(data["code"], "FACTORY_ERROR")
                        self.assertIn(f"{type(failure).__name__}: no GPU left", data["message"])
            self.assertEqual([bool(record.exc_info) for record in log.records], [True, True])

    async def test_a_message_above_16_mib_ends_its_own_socket(self):
        frame_around = len(message("step", {"x": ""}))
        fits, over = (message("step", {"x": "x" * (size - frame_around)}) for size in (LIMIT, LIMIT + 1))
        async with serving() as port, connect(port) as bystander:
            await rpc(bystander, "reset")
            for name, form in {"whole": over, "fragments": [over[:LIMIT], over[LIMIT:]]}.items():
                with self.subTest(name):
                    ws = await connect(port)
                    await rpc(ws, "reset")
                    self.assertEqual((await ask(ws, fits))["data"]["reward"], 0.5)
                    with contextlib.suppress(websockets.ConnectionClosed):
                        await ws.send(form)
                    self.assertEqual((await ended(ws))[0], 1009)
            self.assertEqual((await rpc(bystander, "step", {}))["reward"], 0.5)


class NullEnvironment(Case):
    async def test_reset_and_any_step(self):
        actions = ({}, {"answer": "done"}, {"answer": "42", "tool": "calc", "x": 1}, {"answer": 0}, {"answer": None})
        async with serving() as port, connect(port) as ws:
            for task, action in itertools.product((None, {}, {"task_id": None}, {"task_id": "null"}), actions):
                with self.subTest(task=task, action=action):
                    reply = await rpc(ws, "reset", task)
                    self.assertEqual((reply["reward"], reply["done"]), (None, False))
                    self.assertEqual(reply["observation"]["task_id"], "null")
                    self.assertIsInstance(reply["observation"]["prompt"], str)
                    reply = await rpc(ws, "step", action)
                    self.assertEqual((reply["reward"], reply["done"]), (0.5, True))

    async def test_state(self):
        async with serving() as port, connect(port) as ws:
            wanted = {"episode_id": None, "step_count": 0, "task_id": None, "done": False}
            self.assertEqual(await rpc(ws, "state"), wanted)
            await rpc(ws, "reset", {"episode_id": "mine"})
            self.assertEqual(await rpc(ws, "state"), wanted | {"episode_id": "mine", "task_id": "null"})
            await rpc(ws, "step", {})
            wanted |= {"episode_id": "mine", "step_count": 1, "task_id": "null", "done": True}
            self.assertEqual(await rpc(ws, "state"), wanted)
            await rpc(ws, "reset", {"episode_id": ""})
            ids = {(await rpc(ws, "state"))["episode_id"]}
            for given in (None, {}, {"episode_id": None}):
                await rpc(ws, "reset", given)
                ids.add(str(uuid.UUID((await rpc(ws, "state"))["episode_id"])))
            self.assertEqual((len(ids), "" in ids), (4, True))  # a fresh one each


PAGES = ("/", "/health", "/metadata", "/schema", "/openapi.json")


class Http(Case):
    async def test_pages(self):
        async with serving(max_sessions=5) as port, connect(port), connect(port):
            health, metadata, schema, openapi = [json.loads((await http(port, "GET", page)).body) for page in PAGES[1:]]
            self.assertEqual(health, {"status": "healthy", "active_sessions": 2, "max_sessions": 5})
            self.assertLessEqual(server.METADATA.items(), metadata.items())
            self.assertEqual([type(metadata[key]) for key in ("name", "description", "version")], [str] * 3)
            self.assertEqual(schema, server.SCHEMA)
            self.assertEqual([schema[key]["type"] for key in ("action", "observation", "state")], ["object"] * 3)
            self.assertRegex(openapi["openapi"], r"^3\.\d+\.\d+$")
            self.assertEqual((openapi["info"]["version"], type(openapi["info"]["title"])), ("1.0.0", str))
            self.assertLessEqual({"/health", "/metadata", "/schema"}, openapi["paths"].keys())
            self.assertFalse({"/reset", "/step", "/state"} & openapi["paths"].keys())
            for path, item in openapi["paths"].items():
                self.assertEqual((item.keys(), "responses" in item["get"]), ({"get"}, True))
                self.assertIn((await http(port, "GET", path)).status, (200, 426))
            answer = await http(port, "GET", "/")
            self.assertTrue(answer.headers["content-type"].startswith("text/plain"))
            self.assertEqual([path for path in ("/ws", *PAGES) if path not in answer.body.decode()], [])

    async def test_statuses(self):
        """Each path and method, also with a query; HEAD is GET without the body."""
        methods = ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "get")
        table = [("GET", page, 200) for page in PAGES] + [("GET", "/ws", 426)]
        table += [("GET", path, 404) for path in ("/reset", "/step", "/ws/", "/health/", "/HEALTH", "//", "/docs", "*")]
        table += [(method, path, 405) for path in (*PAGES, "/ws") for method in methods]
        table += [("POST", path, 404) for path in ("/reset", "/step", "/state", "/mcp")]
        async with serving() as port:
            for (method, path, status), query in itertools.product(table, ("", "?x=1&y=/ws", "?")):
                with self.subTest(f"{method} {path}{query}"):
                    answer = await http(port, method, path + query)
                    self.assertEqual(answer.status, status)
                    self.assertEqual(len(answer.body), int(answer.headers["content-length"]))
                    headers = {"allow": {405: "GET, HEAD"}, "upgrade": {426: "websocket"}}
                    for name, values in headers.items():
                        self.assertEqual(answer.headers.get(name), values.get(status))
                    if status == 200 and path != "/":
                        self.assertEqual(answer.headers["content-type"], "application/json")
                        strict(answer.body.decode())
                    if method == "GET":
                        without, same = await http(port, "HEAD", path + query), ("content-type", "allow", "upgrade")
                        self.assertEqual((without.status, without.body), (status, b""))
                        self.assertEqual(*([a.headers.get(name) for name in same] for a in (without, answer)))

    async def test_other_paths_with_an_upgrade(self):
        async with serving() as port:
            for path in ("/", "/health", "/wsx", "/ws/1", "/reset"):
                status = (await http(port, "GET", path, *UPGRADE)).status
                self.assertEqual(status, 200 if path in PAGES else 404, path)
            async with connect(port, "/ws?token=x&y=1") as ws:
                await play(ws)

    async def test_a_request_with_a_body_reads_its_answer(self):
        """Whatever the TCP segments are in which it comes."""
        body, chunked = b'{"task_id": "null"}', b'13\r\n{"task_id": "null"}\r\n0\r\n\r\n'
        forms = [("Content-Length: 19", body), ("content-length:19", body), ("Transfer-Encoding: chunked", chunked)]
        async with serving() as port:
            for (header, body), (path, status) in itertools.product(forms, [("/ws", 405), ("/reset", 404)]):
                request = head("POST", path, "Content-Type: application/json", header)
                data, at = request + body, request.index(header.encode())
                for cuts in ([], [len(request)], [at + 4], [at], [at - 4], [at + len(header) + 1], [len(request) - 1]):
                    parts = [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]
                    with self.subTest(header, path=path, parts=parts):
                        self.assertEqual(parse(await raw(port, *parts)).status, status)


class Origins(Case):
    async def test_a_browser_origin_needs_to_be_allowed(self):
        allowed, other = ["http://localhost:3000", "https://app.example"], ["http://localhost:3001", "null", "", "ü"]
        flags = [f"--allow-origin={origin}" for origin in allowed]  # repeatable
        async with Program("--port=0", *flags) as program, serving() as closed:
            own = f"http://127.0.0.1:{program.port}"
            table = [(program.port, origin, 101) for origin in allowed] + [(closed, origin, 403) for origin in allowed]
            refused = [*other, own, "https://app.example.evil", "HTTP://LOCALHOST:3000/"]
            table += [(port, origin, 403) for port in (program.port, closed) for origin in refused]
            for port, origin, status in table:
                with self.subTest(origin, allows_any=port == closed):
                    self.assertEqual((await http(port, "GET", "/ws", *UPGRADE, f"Origin: {origin}")).status, status)
            for port in (program.port, closed):  # a client that is no browser sends none
                async with connect(port) as ws:
                    await play(ws)


class Token(Case):
    async def test_everything_but_health_needs_the_token(self):
        wrong = [
            "X: y", "Authorization:", "Authorization: Bearer", "Authorization: Bearer ", "Authorization: s3cret",
            "Authorization: Bearer s3cre", "Authorization: Bearer s3crets", "Authorization: Bearer S3CRET",
            "Authorization: Basic s3cret", "Authorization: Bearers3cret", "Authorization: Bearer s3cret x",
            "Authorization: Bearer sécret", "Authorization: ÿ\x80 þ", "Cookie: Bearer s3cret",
        ]  # fmt: skip
        right = "Authorization: Bearer s3cret"
        statuses = dict.fromkeys(PAGES, 200) | {"/ws": 101, "/ws?token=s3cret": 101, "/nothing": 404}
        async with serving(token="s3cret") as port:
            for (path, status), header in itertools.product(statuses.items(), [right, *wrong]):
                with self.subTest(path, header=header):
                    answer = await http(port, "GET", path, *UPGRADE, header)
                    self.assertEqual(answer.status, status if path == "/health" or header == right else 401)
                    self.assertNotIn(b"s3cret", answer.body)
            self.assertEqual((await http(port, "POST", "/reset")).status, 401)
            async with serving(token="") as empty:
                for header in "X: y", "Authorization: Bearer", "Authorization: Bearer ":
                    self.assertEqual((await http(empty, "GET", "/", header)).status, 401)
            async with connect(port, additional_headers={"Authorization": "Bearer s3cret"}) as ws:
                await play(ws)


# ---- Environments ----------------------------------------------------------------------------------------------------


def countdown():
    """The handlers of an environment with several steps: from the seed to zero."""
    left = 0

    def show(reward=None, done=False):
        return server.observation({"left": left}, reward, done, {"from": "countdown"})

    def reset(data):
        nonlocal left
        left = data["seed"]
        return show()

    def step(action):
        nonlocal left
        left -= action["by"]
        return show(float(left == 0), left <= 0)

    return {"reset": reset, "step": step, "state": lambda: {"left": left}}


class Stand:
    """What stands for a NumPy value where NumPy is not installed."""

    def __init__(self, value):
        self.value = value

    def tolist(self):
        return self.value


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Environments(Case):
    async def test_several_steps_sync_and_async(self):
        for asynchronous in (False, True):
            with self.subTest(asynchronous=asynchronous):
                async with serving(environment(countdown(), asynchronous)) as port, connect(port) as ws:
                    for name in ("first", "second", "third"):
                        await rpc(ws, "reset", {"seed": 9, "episode_id": "left"})
                        await rpc(ws, "step", {"by": 1})
                        await rpc(ws, "reset", {"seed": 3, "episode_id": name})  # in the middle of the other
                        for left, reward, done in [(2, 0, False), (1, 0, False), (0, 1, True)]:
                            wanted = {"observation": {"left": left}, "reward": reward, "done": done}
                            got = await rpc(ws, "step", {"by": 1})
                            self.assertEqual(got, wanted | {"metadata": {"from": "countdown"}})
                        state = await rpc(ws, "state")
                        self.assertEqual(state, {"episode_id": name, "step_count": 3, "done": True, "left": 0})
                        self.assertEqual(await code_of(ws, "step", {"by": 1}), "EXECUTION_ERROR")

    async def test_invalid_is_a_validation_error_without_a_traceback(self):
        """That nothing is logged, Case demands."""
        for asynchronous, handler in itertools.product((False, True), ("reset", "step")):
            script = {}
            with self.subTest(handler, asynchronous=asynchronous):
                async with serving(environment(script, asynchronous)) as port, connect(port) as ws:
                    await rpc(ws, "reset", {"episode_id": "x"})
                    before = await rpc(ws, "state")
                    script[handler] = server.Invalid("send {'by': 1}")
                    data = (await ask(ws, message(handler, {})))["data"]
                    self.assertEqual(data["code"], "VALIDATION_ERROR")
                    self.assertIn("send {'by': 1}", data["message"])
                    self.assertIn("send {'by': 1}", data["errors"][0]["msg"])
                    self.assertEqual(await rpc(ws, "state"), before)

    async def test_an_exception_is_an_execution_error_with_one_traceback(self):
        failures = [
            ZeroDivisionError("by zero"), KeyError("key"), TimeoutError("late"), asyncio.CancelledError("inner"),
            SystemExit(3), RecursionError("deep"), StopIteration(), websockets.ConnectionClosedError(None, None),
            UnicodeError("\ud800"), MemoryError(), Mute(),
        ]  # fmt: skip
        for failure, handler, asynchronous in itertools.product(failures, ("reset", "step", "state"), (False, True)):
            script, data = {}, None if handler == "state" else {}
            with self.subTest(handler, failure=type(failure), asynchronous=asynchronous):
                async with serving(environment(script, asynchronous)) as port, connect(port) as ws:
                    await rpc(ws, "reset", {"episode_id": "x"})
                    before = await rpc(ws, "state")
                    script[handler] = failure
                    with self.assertLogs(level="WARNING") as log:
                        reply = (await ask(ws, message(handler, data)))["data"]
                    script.clear()
                    self.assertEqual(reply["code"], "EXECUTION_ERROR")
                    self.assertIn(type(failure).__name__, reply["message"])
                    self.assertIn("" if isinstance(failure, Mute) else str(failure), reply["message"])
                    self.assertEqual([bool(record.exc_info) for record in log.records], [True])
                    self.assertEqual(await rpc(ws, "state"), before)
                    self.assertEqual((await rpc(ws, "step", {}))["reward"], 1.0)

    async def test_what_is_no_observation_or_no_json_is_an_execution_error(self):
        loop, deep, obs, nan, inf = [], [], server.observation, float("nan"), float("inf")
        loop.append(loop)
        for _ in range(100_000):
            deep = [deep]
        values = [nan, -inf, object(), {1}, b"x", 1j, loop, deep, Stand([nan]), Stand(object()), {(1, 2): 3}]
        results = [
            None, {}, [], "x", 1, obs(None), obs([]), obs("x"), obs({}, "1"), obs({}, [1]), obs({}, {}), obs({}, nan),
            obs({}, inf), obs({}, object()), obs({}, Stand("1")), obs({}, Stand([1])), obs({}, Stand(nan)),
            obs({}) | {"done": None}, obs({}) | {"done": 1}, {"observation": {}}, {"reward": 1.0, "done": True},
            *(obs({"x": value}) for value in values), *(obs({}, metadata={"x": value}) for value in values),
            lambda: obs({}, metadata=[1]), lambda: obs({}, metadata="x"),
        ]  # fmt: skip
        script, wanted = {}, {"episode_id": "x", "step_count": 0, "done": False}
        async with serving(environment(script)) as port, connect(port) as ws:
            table = [(handler, result) for handler in ("reset", "step") for result in results]
            table += [("state", result) for result in (None, [], "x", *({"x": value} for value in values))]
            for number, (handler, result) in enumerate(table):
                script.clear()
                await rpc(ws, "reset", {"episode_id": "x"})
                script[handler] = lambda *_, result=result: result() if callable(result) else result
                with self.subTest(handler, number=number), self.assertLogs(level="ERROR"):
                    code = await code_of(ws, handler, None if handler == "state" else {})
                    self.assertEqual(code, "EXECUTION_ERROR")
                    script.clear()
                    self.assertEqual(await rpc(ws, "state"), wanted)

    async def test_what_is_no_json_is_named(self):
        async with serving(environment({"step": server.observation({"x": {1}})})) as port, connect(port) as ws:
            await rpc(ws, "reset")
            with self.assertLogs(level="ERROR"):
                reply = await ask(ws, message("step", {}))
            self.assertIn("Object of type set is not JSON serializable", reply["data"]["message"])

    async def test_a_state_adds_to_the_books_and_cannot_forge_them(self):
        script = {"state": {"episode_id": "lie", "step_count": 99, "done": True, "more": 1}}
        async with serving(environment(script)) as port, connect(port) as ws:
            await rpc(ws, "reset", {"episode_id": "x"})
            wanted = {"episode_id": "x", "step_count": 0, "done": False, "more": 1}
            self.assertEqual(await rpc(ws, "state"), wanted)

    async def test_tolist_goes_out_as_list_or_number(self):
        """For a stand-in, and for NumPy where it is installed."""
        try:
            import numpy
        except ImportError:
            numpy = None
        wrong = [float("nan"), [1, 2], "1"]  # rewards
        for name, array in {"stand-in": Stand, "NumPy": numpy and (lambda value: numpy.array(value)[()])}.items():
            script = {}
            with self.subTest(name):
                if not array:
                    self.skip("NumPy is not installed")
                async with serving(environment(script)) as port, connect(port) as ws:
                    await rpc(ws, "reset")
                    for value in ([[1, 2], [3, 4]], 0.5, 7, True, []):
                        fields = {"deep": [{"x": array(value)}]}
                        script["step"] = server.observation(fields, metadata=fields)
                        got = await rpc(ws, "step", {})
                        self.assertEqual([got["observation"], got["metadata"]], [{"deep": [{"x": value}]}] * 2)
                    for reward in (0.25, True, 2):
                        script["step"] = server.observation({}, array(reward))
                        got = (await rpc(ws, "step", {}))["reward"]
                        self.assertEqual((got, type(got)), (reward, type(reward)))
                    for reward in wrong:
                        script["step"] = server.observation({}, array(reward))
                        with self.assertLogs(level="ERROR"):
                            self.assertEqual(await code_of(ws, "step", {}), "EXECUTION_ERROR")
                    script["step"] = server.observation({}, 1, array(True))
                    self.assertIs((await rpc(ws, "step", {}))["done"], True)

    async def test_close_runs_exactly_once_however_the_socket_ends(self):
        ways = {  # what ends the socket, and the code that the client sees
            "close message": (lambda ws: ws.transport.write(frame(message("close"))), 1000),
            "close frame": (lambda ws: ws.transport.write(frame(b"\x0f\xa0", CLOSE)), 4000),
            "cut": (cut, None),
            "end of stream": (lambda ws: ws.transport.write_eof(), None),
            "error, and gone": (
                lambda ws: (ws.transport.write(frame(message("step", {}))), ws.transport.close()),
                None,
            ),
            "wrong frame": (lambda ws: ws.transport.write(frame("x", mask=False)), 1002),
            "no UTF-8": (lambda ws: ws.transport.write(frame(b"\xff")), 1007),
            "oversize": (lambda ws: ws.transport.write(OVERSIZE), 1009),
            "idle": (lambda ws: None, 1001),
            "server's end": (lambda ws: None, 1001),
        }
        for (name, (way, code)), started in itertools.product(ways.items(), (False, True)):
            closed, calls = asyncio.Event(), []
            script = {
                "close": lambda closed=closed, calls=calls: calls.append(1) or closed.set(),
                "step": server.Invalid("no"),
            }
            with self.subTest(name, started=started):
                async with contextlib.AsyncExitStack() as stack:
                    options = {"max_sessions": 1, "idle_timeout": 0.1 if name == "idle" else 0}
                    port = await stack.enter_async_context(serving(environment(script, started), **options))
                    ws = await connect(port)
                    if started:
                        await rpc(ws, "reset")
                    way(ws)
                    if name == "server's end":
                        await stack.aclose()
                    await wait(closed)
                    self.assertIn((await ended(ws))[0], [code] if code else [None, 1005, 1006])
                    if name != "server's end":
                        await no_sessions(port)
                        async with connect(port) as second:  # the slot is free
                            await rpc(second, "reset")
                            self.assertEqual(calls, [1])
                self.assertEqual(calls, [1] if name == "server's end" else [1, 1])

    async def test_a_client_that_leaves_does_not_cut_close_short(self):
        """Neither while `close` runs, nor while the step runs that it follows."""
        for request in "close", "step":
            at_work, go, events = asyncio.Event(), asyncio.Event(), []

            async def step(action, at_work=at_work):
                at_work.set()
                await asyncio.Event().wait()

            async def close(at_work=at_work, go=go, events=events):
                at_work.set()
                events.append("begun")
                await go.wait()
                with contextlib.suppress(
                    ExceptionGroup
                ):  # Python 3.13 cancels a task again that still counts as cancelled
                    async with asyncio.TaskGroup() as group:
                        group.create_task(asyncio.wait_for(asyncio.Event().wait(), 0))
                await asyncio.sleep(0)
                events.append("ended")

            with self.subTest(request):
                async with serving(environment({"step": step, "close": close}), max_sessions=1) as port:
                    ws = await connect(port)
                    await rpc(ws, "reset")
                    await ws.send(message(request, {} if request == "step" else None))
                    await wait(at_work)
                    cut(ws)
                    async with connect(port) as late:  # still without a slot, and after the server has noticed
                        async with asyncio.timeout(10):
                            self.assertEqual(json.loads(await late.recv())["data"]["code"], "CAPACITY_REACHED")
                    go.set()
                    await no_sessions(port)
                    self.assertEqual(events, ["begun", "ended"])

    async def test_a_close_whose_error_cannot_be_logged_gives_its_slot_back(self):
        async with serving(environment({"close": OSError("disk full")}), max_sessions=1) as port:
            with (
                self.assertLogs(level="ERROR"),
                unittest.mock.patch.object(server.log, "exception", side_effect=OSError),
            ):
                async with connect(port) as ws:
                    await rpc(ws, "reset")
                await no_sessions(port)

    async def test_a_close_that_raises_hurts_nobody(self):
        async with serving(environment({"close": OSError("disk full")}), max_sessions=1) as port:
            for _ in range(2):
                with self.assertLogs(level="ERROR") as log:
                    async with connect(port) as ws:
                        await rpc(ws, "reset")
                        await ws.send(message("close"))
                        self.assertEqual((await ended(ws))[0], 1000)
                self.assertEqual([bool(record.exc_info) for record in log.records], [True])


class Load(Case):
    async def test_a_slow_step_holds_up_nobody(self):
        started, go, thread = asyncio.Event(), asyncio.Event(), threading.Event()

        async def step(action):
            started.set()
            await (asyncio.to_thread(thread.wait, 10) if action else go.wait())
            return server.observation({}, 1.0)

        async with serving(environment({"step": step})) as port, connect(port) as third:
            slow = await connect(port), await connect(port)
            for ws, action in zip(slow, ({}, {"thread": True}), strict=True):
                await rpc(ws, "reset")
                await ws.send(message("step", action))
                await wait(started)
                started.clear()
            await rpc(third, "reset")
            self.assertEqual(await sessions(port), 3)
            go.set()
            thread.set()
            for ws in slow:
                async with asyncio.timeout(10):
                    self.assertEqual(strict(await ws.recv())["data"]["reward"], 1.0)
                cut(ws)

    async def test_a_client_that_pipelines_without_end_holds_up_nobody(self):
        async with Program("--port=0") as program:
            wire, total = await Wire.open(program.port), 20_000
            wire.send(frame(message("state")) * total)
            async with connect(program.port) as ws:
                await play(ws)
            for _ in range(total):
                self.assertEqual((await wire.reply())["type"], "state")
            cut(wire)

    async def test_leaving_in_the_middle_of_a_call_cancels_it(self):
        ways = {
            "close frame": lambda ws: ws.transport.write(frame(b"\x03\xe8", CLOSE)),
            "cut": cut,
            "end of stream": lambda ws: ws.transport.write_eof(),
        }
        for (name, way), handler, pipelined in itertools.product(ways.items(), ("reset", "step", "state"), (0, 1)):
            if pipelined and name == "close frame":
                continue  # it comes behind the other requests
            started, closed, events = asyncio.Event(), asyncio.Event(), []

            async def endless(*_, started=started, events=events):
                started.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    events.append("cancelled")
                    raise

            async def close(closed=closed, events=events):
                await asyncio.sleep(0)  # the cancellation does not hit it, too
                events.append("closed")
                closed.set()

            with self.subTest(name, handler=handler, pipelined=pipelined):
                async with serving(environment({handler: endless, "close": close}), max_sessions=1) as port:
                    ws = await connect(port)
                    if handler == "step":
                        await rpc(ws, "reset")
                    for _ in range(1 + pipelined):
                        await ws.send(message(handler, None if handler == "state" else {}))
                    await wait(started)
                    way(ws)
                    await wait(closed)
                    self.assertEqual(events, ["cancelled", "closed"])
                    await no_sessions(port)

    async def test_no_timer_and_no_task_per_message(self):
        loop, counts = asyncio.get_running_loop(), collections.Counter()

        def counted(method):
            return lambda *args, **options: counts.update([method.__name__]) or method(*args, **options)

        async with serving(environment(), idle_timeout=3600) as port:
            wire = await Wire.open(port)
            await wire.ask("reset")
            with contextlib.ExitStack() as stack:
                for method in (loop.call_at, loop.call_later, loop.create_task):
                    stack.enter_context(unittest.mock.patch.object(loop, method.__name__, counted(method)))
                for _ in range(100):
                    wire.send(frame(message("step", {})))
                    await wire.reader.readuntil(b'"done":false}}')
            cut(wire)
        self.assertLess(max(counts.values(), default=0), 20, counts)


# ---- What a server must withstand ------------------------------------------------------------------------------------


class Sessions(Case):
    async def test_a_paused_trainer_keeps_its_episode(self):
        """It answers no ping for many times the library's timeout; pings still go out."""
        async with Program("--port=0", code="clocks(ping_interval=0.005, ping_timeout=0.005)") as program:
            wire = await Wire.open(program.port)
            await wire.ask("reset")
            for _ in range(10):
                self.assertEqual((await wire.frame())[0], PING)
            self.assertEqual((await wire.ask("step", {}))["data"]["reward"], 0.5)
            cut(wire)

    @USER_TIMEOUT
    async def test_the_kernel_will_find_out_about_a_vanished_client(self):
        big = environment({"step": lambda action: server.observation({"x": "x" * action["size"]}, 1.0)})
        async with server.serve_episodes(big, port=0) as running:
            ws = await connect(running.sockets[0].getsockname()[1])
            for sizes, low, high in ([], 30_000, 120_000), ([1], 30_000, 120_000), ([8_000_000, 1], 0, 0):
                await rpc(ws, "reset")
                for size in sizes:
                    await rpc(ws, "step", {"size": size})
                (connection,) = running.connections
                sock = connection.transport.get_extra_info("socket")
                timeout = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                self.assertTrue(low <= timeout <= high, timeout)
            cut(ws)

    async def test_a_vanished_client_gives_its_slot_back(self):
        """In a network namespace whose only link goes down."""
        name = f"gone{os.getpid()}"

        def ip(*words):
            return subprocess.run(["ip", *words], check=False, capture_output=True).returncode

        if os.geteuid() or not shutil.which("ip") or ip("netns", "add", name):
            self.skip("needs root and `ip netns`")
        self.addCleanup(ip, "netns", "del", name)
        self.assertEqual(ip("-n", name, "link", "set", "lo", "up"), 0)
        code = "clocks(ping_interval=0.01, user_timeout=0.01)\nplug(close=lambda: print('gone', file=sys.stderr))"
        client = """
import time, websockets.sync.client
with websockets.sync.client.connect("ws://127.0.0.1:%d/ws", proxy=None, ping_interval=None) as ws:
    ws.send('{"type": "reset"}')
    print(ws.recv(), flush=True)
    time.sleep(60)
"""
        within = ["ip", "netns", "exec", name]
        async with Program("--port=0", code=code, within=within) as program:
            command = [*within, sys.executable, "-c", client % program.port]
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            try:
                async with asyncio.timeout(20):
                    self.assertIn(b"observation", await process.stdout.readline())
                self.assertEqual(len(program.log), 1)
                self.assertEqual(ip("-n", name, "link", "set", "lo", "down"), 0)
                await program.line("gone")
            finally:
                process.kill()
                await process.communicate()

    @USER_TIMEOUT
    async def test_a_paused_client_with_a_closed_tcp_window_is_not_gone(self):
        """Its kernel answers the window probes, so that its host is there, whatever it has left unread."""
        code = (
            "clocks(user_timeout=0.004)\nplug(step=lambda action: server.observation({'x': 'x' * action['size']}, 1.0))"
        )
        table = {
            "one big reply": [8_000_000],
            "small, then big": [1, 8_000_000],
            "big, then small": [1_000_000, 1],
        }

        async def pause(port, name, sizes):
            wire = await Wire.open(port)
            await wire.ask("reset")
            wire.transport.pause_reading()
            for size in sizes:
                wire.send(frame(message("step", {"size": size})))
            await asyncio.sleep(2.5)  # the pause itself: many times the timeout
            wire.transport.resume_reading()
            with self.subTest(name):
                for size in sizes:
                    reply = await wire.reply()
                    self.assertEqual(len(reply["data"]["observation"]["x"]) if reply else None, size)
                self.assertEqual((await wire.ask("state"))["data"]["step_count"], len(sizes))
            cut(wire)

        async with Program("--port=0", code=code) as program:
            await asyncio.gather(*(pause(program.port, *row) for row in table.items()))

    async def test_a_silent_client_is_closed_with_1001_and_a_reason(self):
        async with Program("--port=0", "--idle-timeout=0.3", code="clocks(ping_interval=0.005)") as program:
            for started in (False, True):
                async with connect(program.port) as ws:  # it answers pings: that is no progress
                    if started:
                        await rpc(ws, "reset")
                    code, reason = await ended(ws)
                    self.assertEqual((code, reason != ""), (1001, True))
            await no_sessions(program.port)

    async def test_a_client_may_leave_before_it_has_read_its_reply(self):
        big = environment({"step": server.observation({"x": "x" * 2**24}, 1.0)})
        async with serving(big) as port:
            wire = await Wire.open(port)
            await wire.ask("reset")
            wire.send(frame(message("step", {})))
            await wire.reader.readexactly(2)  # it has begun to come
            cut(wire)
            await no_sessions(port)

    async def test_a_client_that_does_not_read_its_reply_is_closed(self):
        code = "clocks(close_timeout=0.05)\nplug(step=lambda action: server.observation({'x': 'x' * 40_000_000}))"
        async with Program("--port=0", "--idle-timeout=0.3", code=code) as program:
            wire = await Wire.open(program.port)
            await wire.ask("reset")
            wire.transport.pause_reading()
            wire.send(frame(message("step", {})))
            await no_sessions(program.port)
            cut(wire)

    async def test_idle_is_who_makes_no_progress_and_nobody_else(self):
        go, started = asyncio.Event(), asyncio.Event()

        async def step(action):
            if action:
                started.set()
                await go.wait()
            return server.observation({}, 1.0)

        async def keep_busy(ws):
            while True:
                await rpc(ws, "step", {})
                await asyncio.sleep(0.05)

        async with serving(environment({"step": step}), idle_timeout=0.5) as port, serving(idle_timeout=0) as never:
            active, slow, other = await connect(port), await connect(port), await connect(never)
            for ws in (active, slow, other):
                await rpc(ws, "reset")
            await slow.send(message("step", {"slow": True}))
            await wait(started)
            busy = asyncio.create_task(keep_busy(active))
            for _ in range(2):  # twice the time of an idle one
                async with connect(port) as silent:
                    self.assertEqual((await ended(silent))[0], 1001)
            self.assertFalse(busy.done())
            busy.cancel()
            go.set()
            async with asyncio.timeout(10):
                self.assertEqual(strict(await slow.recv())["data"]["reward"], 1.0)
            self.assertEqual((await rpc(other, "step", {}))["reward"], 0.5)
            for ws in (active, slow, other):
                cut(ws)


STUCK = """
async def step(action):
    print("in a thread", file=sys.stderr)
    await asyncio.to_thread(time.sleep, 600)
async def close(): await asyncio.sleep(600)
plug(step=step, close=close)
"""


class Drain(Case):
    async def quiet_end(self, program, *signals, lines=3):
        """It ends with status 0, and has logged where it listens, the beginning and the end, and nothing else."""
        self.assertEqual(await program.end(*signals), 0)
        self.assertEqual(len(program.log), lines, program.log)

    async def leaves(self, ws):
        code, reason = await ended(ws)
        self.assertEqual((code, reason != ""), (1001, True))

    async def test_a_signal_lets_running_episodes_end_and_nothing_else(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            with self.subTest(number):
                async with Program("--port=0", "--drain-timeout=600") as program:
                    fresh, over, running, again = [await connect(program.port) for _ in range(4)]
                    await play(over)
                    await rpc(running, "reset")
                    await rpc(again, "reset")
                    program.process.send_signal(number)
                    await self.leaves(fresh)  # at once, while the others still run
                    await self.leaves(over)
                    with self.assertRaises((OSError, websockets.InvalidHandshake)):
                        await connect(program.port, open_timeout=5)
                    await again.send(message("reset"))
                    with self.assertRaises(websockets.ConnectionClosed) as end:  # without a reply
                        await asyncio.wait_for(again.recv(), 10)
                    self.assertEqual(end.exception.rcvd.code, 1001)
                    self.assertEqual((await ask(running, "{"))["data"]["code"], "INVALID_JSON")
                    self.assertEqual((await rpc(running, "state"))["step_count"], 0)
                    self.assertEqual((await rpc(running, "step", {}))["reward"], 0.5)
                    await self.leaves(running)
                    await self.quiet_end(program)

    async def test_what_still_runs_after_the_timeout_is_closed_with_1001(self):
        """And does not delay the end: neither a step in a thread nor an environment whose `close` takes for ever."""
        async with Program(
            "--port=0", "--drain-timeout=3", code="clocks(close_timeout=0.05, timeout=0.1)" + STUCK
        ) as program:
            ws, stuck = await connect(program.port), await connect(program.port)
            await rpc(ws, "reset")
            await rpc(stuck, "reset")
            await stuck.send(message("step", {}))
            await program.line("in a thread")
            program.process.send_signal(signal.SIGTERM)
            await self.leaves(ws)
            await self.quiet_end(program, lines=4)
            cut(stuck)

    async def test_it_ends_as_soon_as_the_last_session_is_gone(self):
        for count in (0, 2):
            async with Program("--port=0", "--drain-timeout=600") as program:
                running = [await connect(program.port) for _ in range(count)]
                for ws in running:
                    await rpc(ws, "reset")
                program.process.send_signal(signal.SIGTERM)
                for ws in running:
                    cut(ws)
                await self.quiet_end(program)

    async def test_a_second_signal_ends_it_now(self):
        """Whatever it waits for: an episode, a client that answers no close, a handshake, a thread, an environment."""
        code = "clocks(close_timeout=1000, open_timeout=1000)" + STUCK
        for first, second in [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)]:
            with self.subTest(first=first, second=second):
                async with Program("--port=0", "--drain-timeout=600", code=code) as program:
                    fresh, running, stuck = [await connect(program.port) for _ in range(3)]
                    mute, half = await Wire.open(program.port), await asyncio.open_connection("127.0.0.1", program.port)
                    await rpc(running, "reset")
                    await rpc(stuck, "reset")
                    await stuck.send(message("step", {}))
                    await program.line("in a thread")
                    program.process.send_signal(first)
                    await program.line("drain")
                    await self.quiet_end(program, second, lines=4)
                    self.assertIn((await ended(running))[0], (None, 1001))
                    for one in (mute, half[1], fresh, stuck):
                        cut(one)

    async def test_nobody_delays_it(self):
        """Neither half-made handshakes nor clients that do not read or do not answer, with an episode or without."""
        code, request = "clocks(open_timeout=1000, close_timeout=0.05)", head("GET", "/ws", *UPGRADE)
        async with Program("--port=0", "--drain-timeout=0.3", code=code) as program:
            ends = [(await asyncio.open_connection("127.0.0.1", program.port))[1] for _ in range(20)]
            for writer, data in zip(ends, (b"", b"G", request[:40], request[:-2]) * 5, strict=True):
                writer.write(data)
            ends += (wires := [await Wire.open(program.port) for _ in range(4)])
            for wire in wires[2:]:
                await wire.ask("reset")
            await asyncio.gather(*(wire.stuff(frame(message("state")) * 1000, 16 * MIB) for wire in wires[1:3]))
            await self.quiet_end(program, signal.SIGTERM)
            for one in ends:
                cut(one)

    async def test_an_error_while_it_drains_ends_no_episode(self):
        async def step(action):
            task = asyncio.ensure_future(asyncio.Event().wait())
            task.cancel()
            await task

        async with contextlib.AsyncExitStack() as stack:
            port = await stack.enter_async_context(serving(environment({"step": step}), drain_timeout=600))
            fresh, ws = await connect(port), await connect(port)
            await rpc(ws, "reset")
            end = asyncio.create_task(stack.aclose())
            await self.leaves(fresh)
            with self.assertLogs(level="ERROR"):
                self.assertEqual(await code_of(ws, "step", {}), "EXECUTION_ERROR")
            await ws.close()
            async with asyncio.timeout(10):
                await end

    async def test_a_session_that_begins_as_the_drain_does_is_closed_as_any(self):
        for turns in range(12):
            closed, made = [], []

            async def close(closed=closed):
                await asyncio.sleep(0.05)
                closed.append(1)

            def new_episode(made=made, close=close):
                made.append(1)
                return environment({"close": close})()

            with self.subTest(turns=turns):
                async with serving(new_episode, drain_timeout=600, close_timeout=0.1) as port:
                    pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
                    for _, writer in pairs:
                        writer.write(head("GET", "/ws", *UPGRADE))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                self.assertEqual(len(closed), len(made))
                for _, writer in pairs:
                    cut(writer)

    async def test_the_end_of_the_block_drains(self):
        """A step that is being made may end, and so may its episode."""
        started, go = asyncio.Event(), asyncio.Event()

        async def step(action):
            started.set()
            await go.wait()
            return server.observation({}, 1.0, done=action["last"])

        async with contextlib.AsyncExitStack() as stack:
            port = await stack.enter_async_context(serving(environment({"step": step}), drain_timeout=600))
            fresh, ws = await connect(port), await connect(port)
            await rpc(ws, "reset")
            await ws.send(message("step", {"last": False}))
            await wait(started)
            end = asyncio.create_task(stack.aclose())
            await self.leaves(fresh)
            go.set()
            async with asyncio.timeout(10):
                self.assertEqual(strict(await ws.recv())["data"]["reward"], 1.0)
            self.assertFalse(end.done())
            self.assertTrue((await rpc(ws, "step", {"last": True}))["done"])
            await self.leaves(ws)
            async with asyncio.timeout(10):
                await end


class Full(Case):
    async def test_a_full_server_costs_no_environment_and_disturbs_nobody(self):
        made = []
        async with serving(lambda: made.append(1) or server.null_episode(), max_sessions=2) as port:
            one, two = await connect(port), await connect(port)
            await rpc(one, "reset")
            wires = [await Wire.open(port) for _ in range(5)]  # they do not even answer the close
            for wire in wires:
                self.assertEqual((await wire.reply())["data"]["code"], "CAPACITY_REACHED")
                self.assertEqual(await wire.reply(), 1013)
            self.assertEqual((len(made), await sessions(port)), (2, 2))
            self.assertEqual((await rpc(one, "step", {}))["reward"], 0.5)
            await play(two)
            for ws in (one, two, *wires):
                cut(ws)
            await no_sessions(port)
            async with connect(port) as ws:
                await play(ws)
        self.assertEqual(len(made), 3)

    @PROC
    async def test_the_open_file_limit_is_raised(self):
        """A --max-sessions that cannot fit under the hard limit is told in one line."""
        code = "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 2000))"
        for most, lines in [("1000", 1), ("5000", 2)]:
            async with Program("--port=0", "--max-sessions", most, code=code) as program:
                self.assertEqual(program.proc("Max open files")[3:5], ["2000", "2000"])
                self.assertEqual(len(program.log), lines, program.log)
                self.assertEqual(sum(most in line and "2000" in line for line in program.log), lines - 1)

    async def test_out_of_descriptors(self):
        """Running sessions go on, accepting resumes by itself, and the log stays small."""
        code = "resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))"
        async with Program("--port=0", code=code) as program, connect(program.port) as running:
            await rpc(running, "reset")
            writers = [(await asyncio.open_connection("127.0.0.1", program.port))[1] for _ in range(300)]
            for _ in range(15):  # long enough for it to try again
                self.assertEqual((await rpc(running, "state"))["step_count"], 0)
                await asyncio.sleep(0.1)
            self.assertEqual((await rpc(running, "step", {}))["reward"], 0.5)
            for writer in writers:
                cut(writer)
            async with connect(program.port) as ws:
                await play(ws)
            self.assertEqual(await program.end(signal.SIGTERM), 0)
            self.assertLess(len(program.log), 200)


@PROC
class Memory(Case):
    async def flood(self, data, most, code=None, first=b""):
        """How many bytes the server took and how many more it holds, when a client sends and does not read."""
        async with Program("--port=0", code=code) as program, connect(program.port) as bystander:
            await rpc(bystander, "reset")
            wire = await Wire.open(program.port)
            await wire.ask("reset")
            before = program.memory()
            wire.send(first)
            sent = await wire.stuff(data, most)
            held = program.memory() - before
            self.assertEqual((await rpc(bystander, "state"))["step_count"], 0)
            cut(wire)
            return sent, held

    async def test_a_flood_of_big_messages(self):
        """It holds the message it works on, its reply, and about two more; the library's default is sixteen."""
        big = frame(message("step", {"x": "x" * (LIMIT - 40)}))
        for name, code in [("echo", "plug(step=lambda action: server.observation(action))"), ("stuck", STUCK)]:
            with self.subTest(name):
                sent, held = await self.flood(big, 40 * LIMIT, code)
                self.assertLess(sent, 6 * LIMIT)
                self.assertLess(held, 8 * LIMIT)

    async def test_a_flood_of_small_messages_and_of_pings(self):
        for name, data, code in [
            ("messages", frame(message("state")), None),
            ("messages behind a step", frame(message("step", {})), STUCK),
            ("pings", frame(bytes(125), PING), None),
        ]:
            with self.subTest(name):
                sent, held = await self.flood(data * 4000, 64 * MIB, code)
                self.assertLess(sent, 63 * MIB)
                self.assertLess(held, 16 * MIB)

    async def test_a_flood_of_pings_between_fragments(self):
        """Each fragment that is taken out of the queue makes the library read on, also when nobody reads the pongs."""
        part = frame(b"", 0, fin=False) * 3 + frame(bytes(125), PING) * 900
        sent, held = await self.flood(part, 64 * MIB, first=frame("{", fin=False))
        self.assertLess(sent, 63 * MIB)
        self.assertLess(held, 16 * MIB)

    async def test_half_made_handshakes(self):
        """Thousands of them hold nothing up, hold little, and are gone after the handshake timeout, however they go on."""
        starts = (b"", b"GET", head("GET", "/ws", *UPGRADE)[:-2], b"GET /ws HTTP/1.1\r\nX: " + b"x" * 8000 + b"\r\n")
        async with Program("--port=0", code="clocks(open_timeout=0.2)") as program, connect(program.port) as ws:
            before, pairs = program.memory(), []
            for number in range(2000):
                pairs.append(await asyncio.open_connection("127.0.0.1", program.port))
                pairs[-1][1].write(starts[number % 4])
                if number % 200 == 0:
                    await play(ws)
                    self.assertEqual((await http(program.port, "GET", "/health")).status, 200)
            self.assertLess(program.memory() - before, 64 * MIB)
            async with asyncio.timeout(10):
                while left := {pair for pair in pairs if not (pair[0].at_eof() or pair[0].exception())}:
                    for _, writer in left & {*pairs[2::4], *pairs[3::4]}:
                        writer.write(b"X: y\r\n")  # one more header
                    await asyncio.sleep(0.1)
            for _, writer in pairs:
                cut(writer)
            await play(ws)
            self.assertEqual(await program.end(signal.SIGTERM), 0)
            self.assertEqual(len(program.log), 3, program.log)

    async def test_oversize_headers(self):
        start, line = b"GET /ws HTTP/1.1\r\n", b"X: " + b"x" * 100 + b"\r\n"
        async with Program("--port=0") as program, connect(program.port) as ws:
            before = program.memory()
            for data in (b"GET /" + b"x" * MIB, start + b"X: " + b"x" * MIB, start + line * 50_000, bytes(MIB)):
                with self.subTest(data[:30]):
                    self.assertIn(parse(await raw(program.port, data)).status, (None, 400, 413, 414, 431))
            await play(ws)
            self.assertLess(program.memory() - before, 16 * MIB)
            self.assertEqual(await program.end(signal.SIGTERM), 0)
            self.assertEqual(len(program.log), 3, program.log)


class Secrets(Case):
    async def test_the_token_is_nowhere_to_be_read(self):
        token, bodies = "tok-3e5bd1", b""
        async with Program("--port=0", "--log-level=debug", SERVER_TOKEN=token) as program:
            for value in (f"Bearer {token}", f"Bearer {token}x", f"{token} ü"):
                for path in ("/", "/ws", "/health", "/metadata", "/nothing", f"/ws?token={token}"):
                    bodies += await raw(program.port, head("GET", path, f"Authorization: {value}"))
                bodies += await raw(program.port, head("GET", "/ws", *UPGRADE, f"Authorization: {value}"))
                bodies += await raw(program.port, head("BAD METHOD", "/ws", f"Authorization: {value}"), eof=True)
            async with connect(program.port, additional_headers={"Authorization": f"Bearer {token}"}) as ws:
                await play(ws)
            self.assertEqual(await program.end(signal.SIGTERM), 0)
            self.assertNotIn(token, "".join(program.log) + bodies.decode("latin-1"))

    async def test_nor_in_help_or_errors_and_an_empty_one_is_no_open_door(self):
        token = "tok-3e5bd1"
        for flags, value, wanted in [
            (["--help"], token, 0), (["--port=x"], token, 2), (["--port=0"], token + " x", 2), (["--port=0"], "", 2),
            (["--port=0", "--host=a..b"], token, 1), (["--port=0", "--workers=2"], token, 2),
        ]:  # fmt: skip
            with self.subTest(flags, value=value):
                status, out, err = Program(*flags, SERVER_TOKEN=value).output()
                self.assertEqual((status, err.count("\n")), (wanted, int(wanted > 0)), err)
                self.assertNotIn(token, out + err)
                self.assertTrue(value == token or "SERVER_TOKEN" in err)

    async def test_loopback_by_default_and_a_warning_beyond_it(self):
        async with server.serve_episodes(server.null_episode, port=0) as running:
            self.assertEqual({sock.getsockname()[0] for sock in running.sockets}, {"127.0.0.1"})
        for host, token, warnings in [
            ("127.0.0.1", None, 0), ("localhost", None, 0), ("127.1.2.3", None, 0), ("0.0.0.0", None, 1), ("0.0.0.0", "x", 0),
        ]:  # fmt: skip
            with self.subTest(host, token=token):
                async with Program("--port=0", "--host", host, **({"SERVER_TOKEN": token} if token else {})) as program:
                    await program.end(signal.SIGTERM)
                    self.assertEqual(sum("WARNING" in line for line in program.log), warnings, program.log)


@PROC
class Leaks(Case):
    async def episode(self, number, port, silent):
        """One episode, or half of one, and an end of its socket of a kind that depends on the number."""
        wire = await Wire.open(port)
        self.assertEqual((await wire.ask("reset"))["type"], "observation")
        if number % 2:
            self.assertEqual((await wire.ask("step", {}))["data"]["reward"], 0.5)
        ways = [  # bytes, and the close code; None: the client cuts the connection, False: it closes it
            (frame(message("close")), 1000), (frame(b"\x03\xe8", CLOSE), 1000), (b"", None), (b"", False), (OVERSIZE, 1009),
            (frame("nonsense"), None), (frame("x", mask=False), 1002), (frame(message("state"))[:9], None), (b"", 1001),
        ]  # fmt: skip
        data, code = ways[number // 2 % len(ways)]
        wire.send(data)
        if code == 1001:
            silent.append((wire, code))
        elif code:
            await self.ends(wire, code)
        elif code is None:
            cut(wire)
        else:
            wire.writer.close()

    async def ends(self, wire, code):
        self.assertEqual(await wire.reply(), code)
        cut(wire)

    async def test_episodes_that_end_in_every_way_leave_nothing(self):
        async def run(numbers):
            """Plays these episodes, twenty at a time; gives the memory after them."""
            silent = []

            async def some(numbers):
                for number in numbers:
                    await self.episode(number, program.port, silent)

            await asyncio.gather(*(some(numbers[start::20]) for start in range(20)))
            await asyncio.gather(*(self.ends(*one) for one in silent))  # the idle timeout closes them
            await no_sessions(program.port)
            await until(lambda: len(os.listdir(f"/proc/{program.pid}/fd")) <= files)
            return program.memory()

        total = int(os.environ.get("LEAK_EPISODES", "2000"))
        async with Program("--port=0", "--idle-timeout=1", "--max-sessions=2000") as program:
            files = len(os.listdir(f"/proc/{program.pid}/fd"))
            warm = await run(range(total // 2))
            grown = await run(range(total // 2, total)) - warm
            self.assertLess(grown, 4 * MIB)
            self.assertEqual(await program.end(signal.SIGTERM), 0)
            self.assertEqual(len(program.log), 3, program.log)


WILD = """
async def fails():
    await asyncio.sleep(0.01)
    raise ValueError("inner")

async def leaves():
    await asyncio.sleep(0.01)
    exit(3)

async def step(action):
    import server
    match action.get("do"):
        case "exit": exit(3)
        case "exit in a task": await asyncio.gather(leaves())
        case "exit in a forgotten task":
            asyncio.create_task(leaves())
            await asyncio.sleep(0.05)
        case "stop the loop": asyncio.get_running_loop().stop()
        case "TaskGroup":
            async with asyncio.TaskGroup() as group:
                group.create_task(fails())
        case "BaseException": raise BaseException("base")
        case "KeyboardInterrupt": raise KeyboardInterrupt
        case "CancelledError": raise asyncio.CancelledError
        case "note":
            exc = ValueError("its text")
            exc.add_note("a note")
            raise exc
        case "nothing": return None
    return server.observation({}, 1.0)

async def close():
    task = asyncio.create_task(asyncio.sleep(600))
    await asyncio.sleep(0)
    task.cancel()
    await task

plug(step=step, close=close)
"""


class Wild(Case):
    """Environments run code that a model wrote: it may do anything, and costs its own step only."""

    async def test_what_a_step_does_to_the_process_ends_neither_server_nor_session(self):
        texts = {
            "exit": "SystemExit: 3",
            "exit in a task": "SystemExit: 3",
            "exit in a forgotten task": None,
            "stop the loop": None,
            "TaskGroup": "ExceptionGroup",
            "BaseException": "BaseException: base",
            "KeyboardInterrupt": "KeyboardInterrupt",
            "CancelledError": "CancelledError",
            "note": "ValueError: its text",
            "nothing": "must return observation",
        }
        async with Program("--port=0", code=WILD) as program, connect(program.port) as bystander:
            await rpc(bystander, "reset", {"episode_id": "bystander"})
            ws = await connect(program.port)
            await rpc(ws, "reset")
            count = 0
            for do, text in texts.items():
                with self.subTest(do):
                    reply = await ask(ws, message("step", {"do": do}))
                    if text:
                        self.assertEqual(reply["data"]["code"], "EXECUTION_ERROR")
                        self.assertIn(text, reply["data"]["message"])
                    for _ in range(2):
                        self.assertEqual((await rpc(ws, "step", {}))["reward"], 1.0)
                    count += 2 + (text is None)
                    self.assertEqual((await rpc(ws, "state"))["step_count"], count)
            await ws.send(message("close"))
            self.assertEqual(await ended(ws), (1000, ""))
            self.assertEqual((await rpc(bystander, "state"))["episode_id"], "bystander")

    async def test_two_signals_at_once_are_two(self):
        async with Program("--port=0", "--drain-timeout=600") as program, connect(program.port) as ws:
            await rpc(ws, "reset")
            for number in signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT:
                program.process.send_signal(number)
            async with asyncio.timeout(10):
                self.assertEqual(await program.process.wait(), 0)

    async def test_an_environment_without_step_does_not_echo_the_client(self):
        async with serving(lambda: {"reset": lambda data: server.observation({})}) as port, connect(port) as ws:
            await rpc(ws, "reset")
            with self.assertLogs(level="ERROR"):
                code = await code_of(ws, "step", {"observation": {}, "reward": 1, "done": True})
            self.assertEqual(code, "EXECUTION_ERROR")


# ---- The fuzzer ------------------------------------------------------------------------------------------------------

VALUES = [
    None, True, 0, -1, 1.5, -0.0, 1e308, 10**30, "", "null", "reset", "x" * 255, "x" * 256, "\ud800", "\0ü😀", [], {}, [{}],
    {"": None}, {"type": "close"}, float("inf"), "@BIG", "@DEEP", "@NAN", "@EXP",
]  # fmt: skip
MESSAGES = [
    {"type": "reset"}, {"type": "reset", "data": {"task_id": "null", "seed": 1, "episode_id": "e"}}, {"type": "state"},
    {"type": "step", "data": {"answer": "x", "n": [1, {"a": None}]}}, {"type": "step", "data": {}}, {"type": "close"},
]  # fmt: skip


def mutate(rng, value):
    """A copy of a JSON value with one node changed, added, removed or renamed."""
    if not isinstance(value, dict) or not value or rng.random() < 0.2:
        number = rng.random() * 10.0 ** rng.randrange(-300, 300)
        return rng.choice([rng.choice(VALUES), rng.choice(VALUES), [value], {"type": value}, number])
    key, names = rng.choice(list(value)), ["x", "", "type", "data", "task_id", "seed", "episode_id"]
    return rng.choice(
        [
            value | {key: mutate(rng, value[key])},
            value | {key: mutate(rng, value[key])},
            value | {rng.choice(names): rng.choice(VALUES)},
            {k: v for k, v in value.items() if k != key},
            {rng.choice(names) if k == key else k: v for k, v in value.items()},
        ]
    )


def damage(rng, data, most):
    """The bytes with up to so many cuts, changes and repetitions."""
    for _ in range(rng.choice([0, 0, 0, 1, most])):
        at, other = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
        data = rng.choice(
            [data[:at], data[:at] + rng.randbytes(1) + data[at + 1 :], data[:at] + data[other:], data * 2]
        )
    return data


def payload(rng):
    """The bytes of a message, from random to right."""
    if rng.random() < 0.05:
        return rng.randbytes(rng.choice([0, 1, 10, 200, 70_000]))
    value = rng.choice(MESSAGES)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        value = mutate(rng, value)
    text, deep = json.dumps(value, ensure_ascii=rng.random() < 0.5), 10 ** rng.randrange(1, 6)
    for name, other in {"BIG": "9" * 5000, "DEEP": "[" * deep + "]" * deep, "NAN": "NaN", "EXP": "-1e999"}.items():
        text = text.replace(f'"@{name}"', other)
    return damage(rng, text.encode(rng.choice(["utf-8"] * 20 + ["utf-16", "utf-8-sig"]), "surrogatepass"), 3)


def valid(rng):
    """The frames of a message that the protocol allows, whole or in fragments; and whether it is a right `close`."""
    data, closes = payload(rng), False
    try:
        opcode = BINARY
        text = data.decode()
        opcode = rng.choice([TEXT, BINARY])
        closes = json.loads(text) == {"type": "close"}
    except (ValueError, RecursionError):
        pass
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 0, 0, 1, 4])))
    frames = b""
    for number, (start, end) in enumerate(itertools.pairwise([0, *cuts, len(data)])):
        frames += frame(data[start:end], 0 if number else opcode, fin=number == len(cuts))
        if rng.random() < 0.2:
            frames += frame(rng.randbytes(rng.choice([0, 5, 125])), rng.choice([PING, PONG]))
    return frames, closes


def invalid(rng):
    """Bytes after which the protocol demands, or allows, the end of the socket."""
    good, data = valid(rng)[0], payload(rng)
    control = rng.choice([PING, PONG, CLOSE])
    close = rng.choice([b"", b"x", b"\x03\xe8", b"\x03\xe8ok", b"\0\0", b"\xff\xff", b"\x03\xe8\xff"])
    size = struct.pack("!Q", rng.choice([LIMIT + 1, 2**40, 2**63]))
    return rng.choice([
        frame(data, rng.choice([3, 4, 5, 6, 7, 11, 12, 13, 14, 15])), frame(data, rsv=rng.randrange(1, 8)),
        frame(data, mask=False), frame(data, 0), frame(data, fin=False) + frame(data), frame(b"\xff" + data),
        frame(bytes(rng.choice([126, 300])), control), frame(b"x", control, fin=False), frame(close, CLOSE) + good,
        b"\x81\xff" + size + bytes(4) + good, good[: rng.randrange(len(good))], damage(rng, good, 5),
        rng.randbytes(rng.choice([1, 2, 10, 100, 3000])),
    ])  # fmt: skip


class Fuzz(Case):
    async def test_fuzz(self):
        """After each case the same socket, or a new one where the protocol demands the end, plays a whole episode."""
        seed, seconds = os.environ.get("FUZZ_SEED", "1"), float(os.environ.get("FUZZ_SECONDS", "3"))
        rng, counts, end = random.Random(seed), collections.Counter(), time.monotonic() + seconds
        async with Program("--port=0") as program, connect(program.port) as bystander:
            await rpc(bystander, "reset", {"episode_id": "bystander"})
            before, wire = await rpc(bystander, "state"), await Wire.open(program.port)
            while time.monotonic() < end:
                name = f"case {counts['cases']} of seed {seed}"
                counts["cases"] += 1
                with self.subTest(name):
                    wire, old = None, wire
                    wire = await self.case(rng, program.port, old, name, counts)
                if not wire:  # it failed
                    break
                if counts["cases"] % 50 == 0:
                    self.assertEqual(await rpc(bystander, "state"), before)
                    request = head(rng.choice(["GET", "POST", "ü", ""]), rng.choice(["/ws", "/health", "/ü"]), *UPGRADE)
                    answer = parse(await raw(program.port, damage(rng, request, 5) + b"\r\n", eof=True))
                    self.assertNotEqual(answer.status, 500)
            self.assertEqual((await rpc(bystander, "step", {}))["reward"], 0.5)
            cut(wire)
            await bystander.close()
            await no_sessions(program.port)
            self.assertEqual(await program.end(signal.SIGTERM), 0)
            self.assertEqual(len(program.log), 3, program.log)

    async def case(self, rng, port, wire, name, counts):
        """Sends some messages and a whole episode behind them; gives the socket for the next case."""
        frames, closes = zip(*(valid(rng) for _ in range(rng.choice([1, 1, 2, 8]))), strict=True)
        broken = invalid(rng) if rng.random() < 0.2 else b""
        episode = [message("reset", {"episode_id": name}), message("state"), message("step", {})]
        data = b"".join([*frames, broken, *map(frame, episode)])
        size = rng.choice([len(data), len(data), 1000, len(data) // 3 + 1])
        for start in range(0, len(data), size):
            wire.send(data[start : start + size])
            await asyncio.sleep(0)
        if broken:  # the server may wait for more of it
            wire.writer.write_eof()
        replies, codes = 0, ("INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR", "EXECUTION_ERROR")
        while isinstance(reply := await wire.reply(), dict):
            replies += 1
            data = reply["data"]
            self.assertIn(reply["type"], ["error"] if data.get("code") in codes else ["observation", "state"])
            if reply["type"] == "state" and data["episode_id"] == name and not broken:
                break
        counts["replies"] += replies
        if isinstance(reply, dict):
            last = (await wire.reply())["data"]
            self.assertEqual((last["reward"], last["done"], any(closes)), (0.5, True, False))
            self.assertEqual(replies, len(frames) + 2)  # one each
            return wire
        counts[f"ended with {reply}"] += 1
        self.assertIn(reply, [1000] * any(closes) + [None, 0, 1000, 1002, 1007, 1009] * bool(broken))
        if any(closes) and not broken:
            self.assertEqual(replies, closes.index(True))
        cut(wire)
        wire = await Wire.open(port)
        self.assertEqual((await wire.ask("reset"))["type"], "observation")
        self.assertEqual((await wire.ask("step", {}))["data"]["reward"], 0.5)
        return wire


# ---- The command line ------------------------------------------------------------------------------------------------


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


class CommandLine(Case):
    async def test_help_explains_itself(self):
        status, out, err = Program("--help").output()
        self.assertEqual((status, err), (0, ""))
        for word in (
            "--host", "127.0.0.1", "--port", "8000", "PORT", "--max-sessions", "1000", "MAX_CONCURRENT_ENVS", "3600", "30",
            "--idle-timeout", "--drain-timeout", "--allow-origin", "--workers", "--log-level", "SERVER_TOKEN",
        ):  # fmt: skip
            self.assertIn(word, out)

    async def test_wrong_flags_and_variables_get_one_line_and_exit_2(self):
        flags = (
            "--port=x", "--port=-1", "--port=65536", "--port=", "--max-sessions=0", "--max-sessions=-5", "--max-sessions=1.5",
            "--idle-timeout=-1", "--idle-timeout=nan", "--idle-timeout=x", "--drain-timeout=-1", "--drain-timeout=nan",
            "--workers=0", "--workers=x", "--log-level=loud", "--nonsense", "--host", "word",
        )  # fmt: skip
        table = [([flag], {}, flag.split("=")[0]) for flag in flags]
        table += [([], {"PORT": value}, "port") for value in ("x", "-1", "")]
        table += [([], {"MAX_CONCURRENT_ENVS": value}, "max-sessions") for value in ("x", "0", "")]
        table += [(["--workers=2", "--port=0"], {}, "--port"), ([], {"SERVER_TOKEN": ""}, "SERVER_TOKEN")]
        for argv, variables, word in table:
            with self.subTest(argv, variables=variables), contextlib.ExitStack() as stack:
                stack.enter_context(unittest.mock.patch.object(sys, "argv", ["server.py", *argv]))
                stack.enter_context(unittest.mock.patch.dict(os.environ, variables))
                stack.enter_context(
                    unittest.mock.patch("multiprocessing.process.BaseProcess.start", side_effect=TypeError)
                )
                err = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
                with self.assertRaises(
                    SystemExit
                ) as end:  # a server that starts raises RuntimeError: a loop is running
                    runpy.run_path(server.__file__, run_name="__main__")
                self.assertEqual((end.exception.code, err.getvalue().count("\n")), (2, 1), err.getvalue())
                self.assertIn(word, err.getvalue())

    def test_without_websockets_both_programs_say_what_is_needed(self):
        for path in server.__file__, replay.__file__:
            ended = subprocess.run(
                [sys.executable, "-IS", path], check=False, capture_output=True, text=True, timeout=20
            )
            self.assertEqual((ended.returncode, ended.stdout, ended.stderr.count("\n")), (1, "", 1), ended.stderr)
            self.assertIn("pip install 'websockets>=17,<18'", ended.stderr)

    async def test_where_it_cannot_listen_it_says_so_in_one_line_and_exits_1(self):
        with socket.create_server(("127.0.0.1", 0)) as sock:
            taken = str(sock.getsockname()[1])
            for flags, word in [
                (["--port", taken], taken), (["--port", taken, "--workers=2"], taken),
                (["--port=0", "--host=no such host"], "no such host"), (["--port=0", "--host=a..b"], "a..b"),
                (["--port", str(free_port()), "--host=no such host", "--workers=2"], "no such host"),
            ]:  # fmt: skip
                with self.subTest(flags):
                    status, out, err = Program(*flags).output()
                    self.assertEqual((status, out, err.count("\n")), (1, "", 1), err)
                    self.assertIn(word, err)

    async def test_variables_and_flags(self):
        port = free_port()
        variables = {"PORT": str(port), "MAX_CONCURRENT_ENVS": "7"}
        for flags, limit in [([], 7), (["--port=0", "--max-sessions=3"], 3)]:
            async with Program(*flags, **variables) as program:
                self.assertEqual(program.port == port, not flags)
                self.assertEqual(json.loads((await http(program.port, "GET", "/health")).body)["max_sessions"], limit)

    async def test_one_line_says_where_it_listens_and_how_to_try_it(self):
        for host, shown in [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")]:
            try:
                socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
            except OSError:
                self.skip(f"no {host} here")
            async with Program("--port=0", "--host", host) as program:
                self.assertEqual(len(program.log), 1)
                self.assertIn(f"python -m websockets ws://{shown}:{program.port}/ws", program.log[0])
                async with connect(program.port, host=shown) as ws:
                    await play(ws)
                self.assertEqual(await program.end(signal.SIGINT), 0)
                self.assertEqual(len(program.log), 3, program.log)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def workers(pid):
    """The processes that a process has started, without multiprocessing's own helper."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = [int(word) for word in file.read().split()]
    found = set()
    for child in children:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{child}/cmdline") as file:
            if "resource_tracker" not in file.read():
                found.add(child)
    return found


@PROC
class Workers(Case):
    async def fill(self, port):
        """Eight sessions with a running episode: four in each worker, which is full with them."""
        full = []
        async with asyncio.timeout(20):
            while len(full) < 8:
                try:
                    ws = await connect(port)
                    await rpc(ws, "reset")
                    full.append(ws)
                except (OSError, websockets.InvalidHandshake):
                    await asyncio.sleep(0.02)  # it does not listen yet
                except (AssertionError, websockets.ConnectionClosed):
                    await ws.close()  # CAPACITY_REACHED: the kernel chose a worker that is full
        return full

    @contextlib.asynccontextmanager
    async def two(self):
        """A server with two workers, their process ids, and eight sessions. In the end no process is left."""
        flags = ["--workers=2", f"--port={free_port()}", "--max-sessions=4", "--drain-timeout=600"]
        async with Program(*flags, ready="ws://") as program:
            full = await self.fill(program.port)
            pids = workers(program.pid)
            self.assertEqual(len(pids), 2)
            yield program, pids, full
            await until(lambda: not any(map(alive, pids)))
            self.assertNotIn("Traceback", "".join(program.log))
            for ws in full:
                cut(ws)

    async def test_a_signal_drains_all(self):
        for number, send in [(signal.SIGTERM, os.kill), (signal.SIGINT, os.killpg)]:  # Ctrl-C goes to the whole group
            with self.subTest(number):
                async with self.two() as (program, pids, full):
                    send(program.pid, number)
                    for ws in full:
                        self.assertEqual((await rpc(ws, "step", {}))["reward"], 0.5)
                        self.assertEqual((await ended(ws))[0], 1001)
                    self.assertEqual(await program.end(), 0)
                    self.assertFalse(any(map(alive, pids)))

    async def test_a_second_signal_ends_all_now(self):
        async with self.two() as (program, pids, _):
            program.process.send_signal(signal.SIGTERM)
            for _ in pids:  # each of them has noticed
                await program.line("drain")
            self.assertEqual(await program.end(signal.SIGTERM), 0)
            self.assertFalse(any(map(alive, pids)))

    async def test_a_killed_worker_is_started_again_while_the_other_goes_on(self):
        async with self.two() as (program, pids, full):
            os.kill(min(pids), signal.SIGKILL)
            rewards = collections.Counter()
            for ws in full:
                try:
                    rewards[(await rpc(ws, "step", {}))["reward"]] += 1
                except websockets.ConnectionClosed:
                    rewards[None] += 1
            self.assertEqual(rewards, {0.5: 4, None: 4})
            for ws in full:
                await ws.close()
            for ws in await self.fill(program.port):
                await ws.close()
            self.assertEqual(len(workers(program.pid) - pids), 1)
            self.assertEqual(await program.end(signal.SIGTERM), 0)

    async def test_a_killed_parent_leaves_no_process(self):
        async with self.two() as (program, _, full):
            program.process.kill()
            for ws in full:  # the workers drain
                await ws.close()


# ---- The README ------------------------------------------------------------------------------------------------------


def readme():
    """Its text."""
    with open(os.path.join(os.path.dirname(os.path.abspath(server.__file__)), "README.md"), encoding="utf-8") as file:
        return file.read()


def block(language, start=""):
    """The first fenced block of a language in it, or the first that starts so."""
    return re.search(rf"^```{language}\n({start}.*?)^```$", readme(), re.MULTILINE | re.DOTALL)[1]


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


class Readme(Case):
    async def test_its_environment_is_complete_and_plays(self):
        code = block("python")
        self.assertLessEqual(len(code.split("\n\n\nEPISODE")[0].splitlines()), 25)
        names = vars(server) | {"random": random}
        exec(code, names)  # noqa: S102  it is our own README's
        async with serving(names["EPISODE"]) as port, connect(port) as ws:
            for seed in range(100):
                secret = random.Random(seed).randint(1, 100)
                self.assertIs((await rpc(ws, "reset", {"seed": seed}))["done"], False)
                self.assertEqual(await code_of(ws, "step", {"guess": "x"}), "VALIDATION_ERROR")
                low, high, reply = 1, 100, {"done": False}
                while not reply["done"]:
                    guess = (low + high) // 2
                    reply = await rpc(ws, "step", {"guess": guess})
                    low, high = (guess + 1, high) if reply["observation"]["answer"] == "higher" else (low, guess - 1)
                self.assertEqual((guess, reply["reward"]), (secret, 1.0))
            await rpc(
                ws, "reset", {"seed": next(seed for seed in range(100) if random.Random(seed).randint(1, 100) > 1)}
            )
            replies = [await rpc(ws, "step", {"guess": 1}) for _ in range(7)]
            self.assertEqual([reply["done"] for reply in replies], [False] * 6 + [True])
            with tempfile.TemporaryDirectory() as folder:
                episodes = os.path.join(folder, "episodes.json")
                write(episodes, block("json"))
                command = [replay.__file__, f"127.0.0.1:{port}", os.path.join(folder, "log"), "--episodes", episodes]
                process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=subprocess.PIPE)
                self.assertIn(b"3 of 3 ok", (await process.communicate())[0])

    @PROC
    async def test_its_processes_end_with_their_episode_and_with_their_client(self):
        names = dict(vars(server))
        exec(block("python", "def shell"), names)  # noqa: S102  it is our own README's
        with tempfile.TemporaryDirectory() as directory:
            async with serving(names["shell_episode"]) as port, connect(port) as ws:

                async def run(command):
                    await rpc(ws, "reset")
                    await ws.send(message("step", {"command": f"cd {directory}; {command}"}))

                async def pids(*files):
                    paths = [pathlib.Path(directory, file) for file in files]
                    await until(lambda: all(path.exists() and path.read_text().endswith("\n") for path in paths))
                    return [int(path.read_text()) for path in paths]

                for command, reward in [("exit 3", 0.0), ("sleep 600 >/dev/null & echo $! >left", 1.0)]:
                    await run(command)
                    self.assertEqual(strict(await ws.recv())["data"]["reward"], reward)
                await run("sleep 600 & echo $! >one; echo $$ >two; sleep 600")
                running = await pids("one", "two")
                self.assertFalse(any(map(alive, await pids("left"))))
                self.assertTrue(all(map(alive, running)))
                cut(ws)
                await until(lambda: not any(map(alive, running)))

    def test_its_flags_and_variables_are_those_of_the_programs(self):
        options = readme().split("\n## Options\n")[1].split("\n## ")[0]
        server_options, replay_options = options.split("\n`python replay.py")
        flags, variable = r"--[a-z][a-z-]+", r"variable `([A-Z_]+)`"
        for program, text in (server, server_options), (replay, replay_options):
            command = [sys.executable, program.__file__, "--help"]
            wide = os.environ | {"COLUMNS": "200"}  # nothing is broken at a hyphen
            help_text = subprocess.run(command, capture_output=True, text=True, check=True, env=wide).stdout
            self.assertEqual(set(re.findall(flags, text)), set(re.findall(flags, help_text)) - {"--help"})
            if program is server:
                self.assertEqual(set(re.findall(variable, text)) - set(re.findall(r"[A-Z_]{4,}", help_text)), set())
                for language in "dockerfile", "ini", "yaml":
                    used = set(re.findall(flags, block(language))) - {"--no-cache-dir"}  # which is pip's
                    self.assertTrue(used)
                    self.assertLessEqual(used, set(re.findall(flags, help_text)))


# ---- Past one machine ------------------------------------------------------------------------------------------------


class Proxy(Case):
    """Episodes through HAProxy, by the configuration in the README."""

    async def asyncSetUp(self):
        await super().asyncSetUp()
        if not shutil.which("haproxy"):
            self.skip("HAProxy is not installed")

    @contextlib.asynccontextmanager
    async def proxy(self, *ports):
        config = block("haproxy").replace("inter 2s", "inter 100ms")
        front = free_port()
        for old, new in zip((8000, 8001, 8002), (front, *ports), strict=True):
            config = config.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
        with tempfile.NamedTemporaryFile("w", suffix=".cfg") as file:
            file.write(config)
            file.flush()
            process = await asyncio.create_subprocess_exec("haproxy", "-db", "-q", "-f", file.name)
            try:
                async with asyncio.timeout(20):
                    while not await is_served(front):
                        await asyncio.sleep(0.02)
                yield front
            finally:
                process.terminate()
                await process.wait()

    async def test_a_restart_behind_it_loses_no_episode(self):
        async with Program("--port=0") as one, Program("--port=0") as two, self.proxy(one.port, two.port) as front:
            async with contextlib.AsyncExitStack() as stack:
                running = [await stack.enter_async_context(connect(front)) for _ in range(40)]
                for ws in running:
                    await rpc(ws, "reset")
                held = [await sessions(program.port) for program in (one, two)]
                self.assertEqual(held, [20, 20])  # leastconn
                one.process.send_signal(signal.SIGTERM)
                await one.line("draining")
                for _ in range(40):  # whole episodes, before and after HAProxy has noticed
                    async with connect(front) as ws:
                        await play(ws)
                for ws in running:
                    reply = await rpc(ws, "step", {})
                    self.assertEqual((reply["reward"], reply["done"]), (0.5, True))
            self.assertEqual(await one.process.wait(), 0)
            async with connect(front) as ws:
                await play(ws)


async def is_served(port):
    """Whether HAProxy finds a server that is up."""
    try:
        return (await http(port, "GET", "/health", "Connection: close"))[0] == 200
    except OSError:
        return False


# ---- replay.py -------------------------------------------------------------------------------------------------------

HERE = pathlib.Path(server.__file__).parent
PROXIES = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https", "ws", "wss", "all", "socks")}


def one_task(step: Callable[[dict[str, Any]], Any]) -> Callable[[], server.Environment]:
    """Environments of one task whose `step` is the function given."""
    return lambda: {"reset": lambda data: server.observation({"task_id": data.get("task_id")}), "step": step}


def counting(steps: int, reward: Any = 0.5) -> Callable[[], server.Environment]:
    """Environments that are done after so many steps."""

    def new_episode() -> server.Environment:
        count = 0

        def reset(data: dict[str, Any]) -> dict[str, Any]:
            nonlocal count
            count = 0
            return server.observation({})

        def step(action: dict[str, Any]) -> dict[str, Any]:
            nonlocal count
            count += 1
            return server.observation({"count": count}, reward if count == steps else None, count == steps)

        return {"reset": reset, "step": step}

    return new_episode


class ReplayCase(unittest.IsolatedAsyncioTestCase):
    """Runs replay.py as its users do."""

    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)
        self.log = self.directory / "log.json"

    asyncSetUp = Case.asyncSetUp

    async def start(self, *args: Any, env: dict[str, str] | None = None, **options: Any) -> asyncio.subprocess.Process:
        """Starts `python replay.py ARGS`. It is killed at the end of the test if it is still there."""
        kept = {name: value for name, value in os.environ.items() if name not in ("SERVER_TOKEN", *PROXIES)}
        pipes = {
            "stdin": asyncio.subprocess.DEVNULL,
            "stdout": asyncio.subprocess.PIPE,
            "stderr": asyncio.subprocess.PIPE,
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            HERE / "replay.py",
            *map(str, args),
            cwd=self.directory,
            env=kept | (env or {}),
            **pipes | options,
        )

        async def end() -> None:
            if process.returncode is None:
                process.kill()
                await process.communicate()

        self.addAsyncCleanup(end)
        return process

    async def replay(self, *args: Any, **options: Any) -> tuple[int | None, list[str], list[str]]:
        """Runs replay.py to its end: its exit status and the lines of stdout and stderr. There is never a traceback."""
        process = await self.start(*args, **options)
        async with asyncio.timeout(30):
            out, err = (text.decode() for text in await process.communicate())
        self.assertNotIn("Traceback", err)
        self.assertNotIn("Exception ignored", err)
        self.assertFalse([path for path in self.directory.iterdir() if "tmp" in path.name], "a stray temporary file")
        return process.returncode, out.splitlines(), err.splitlines()

    def refused(self, *args: Any) -> str:
        """The one line that a wrong use gets. In this process, which is faster."""
        err = io.StringIO()
        argv = ["replay.py", *map(str, args)]
        patched = unittest.mock.patch("sys.argv", argv)
        with patched, contextlib.redirect_stderr(err), self.assertRaises(SystemExit) as caught:
            replay.main()
        self.assertEqual(caught.exception.code, 2)
        self.assertRegex(err.getvalue(), r"\Areplay.py: error: .*\n\Z")
        return err.getvalue()

    def logged(self) -> dict[str, Any]:
        """The log, which is strict JSON and has exactly the keys that other tools read."""
        log = json.loads(self.log.read_text(), parse_constant=self.fail)
        self.assertEqual(list(log), ["url", "at_utc", "episodes", "all_ok"])
        for row in log["episodes"]:
            group = "concurrent_group_rewards" in row
            keys = (
                {"task_id", "concurrent_group_rewards", "ok"} if group else {"task_id", "action", "reset", "step", "ok"}
            )
            self.assertEqual(set(row), keys if row["ok"] else keys | {"error"})
        return log

    def file(self, content: Any) -> pathlib.Path:
        """A file for --episodes."""
        path = self.directory / f"episodes{len(list(self.directory.iterdir()))}.json"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    @contextlib.asynccontextmanager
    async def served(self, new_episode: Callable[[], server.Environment], **options: Any) -> AsyncIterator[str]:
        """The address of a server with these environments."""
        with self.assertNoLogs("server", "CRITICAL"):  # keeps the tracebacks of environments that fail by design quiet
            async with server.serve_episodes(new_episode, host="127.0.0.1", port=0, **options) as running:
                yield f"127.0.0.1:{running.sockets[0].getsockname()[1]}"

    @contextlib.asynccontextmanager
    async def answered(self, handler: Callable[[ServerConnection], Any]) -> AsyncIterator[str]:
        """The address of a WebSocket server that speaks no protocol but what the handler does."""
        async with serve(handler, "127.0.0.1", 0) as running:
            yield f"127.0.0.1:{running.sockets[0].getsockname()[1]}"

    @contextlib.asynccontextmanager
    async def raw(self, handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> AsyncIterator[str]:
        """The address of a TCP server."""
        running = await asyncio.start_server(handler, "127.0.0.1", 0)
        async with running:
            yield f"127.0.0.1:{running.sockets[0].getsockname()[1]}"


class ReplayOfEpisodes(ReplayCase):
    """What it plays, prints, and logs."""

    def test_the_constants(self) -> None:
        actions = [{"answer": "done"}, {}, {"answer": "42", "tool": "calc", "x": 1}, {"answer": 0}, {"answer": None}]
        self.assertEqual((replay.TASK_IDS, replay.ACTIONS, replay.REWARD), (["null"], actions, 0.5))

    async def test_a_right_server(self) -> None:
        sessions = []

        def new_episode() -> server.Environment:
            sessions.append(1)
            return server.null_episode()

        async with self.served(new_episode) as url:
            status, out, err = await self.replay(url, self.log)
        self.assertEqual((status, err, len(out)), (0, [], 7))
        for line, action in zip(out, replay.ACTIONS, strict=False):
            self.assertTrue(line.startswith(f"OK   null {json.dumps(action)} -> {{"), line)
            self.assertIn('"reward": 0.5', line)
        self.assertTrue(
            out[5].startswith('OK   null {"answer": "done"} 5 at once -> [0.5, 0.5, 0.5, 0.5, 0.5]'), out[5]
        )
        self.assertIn("6 of 6 ok", out[6])
        self.assertEqual(len(sessions), 10, "each episode has a connection of its own, and nothing else has one")
        log = self.logged()
        self.assertEqual((log["url"], log["all_ok"]), (f"ws://{url}/ws", True))
        age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(log["at_utc"])
        self.assertTrue(datetime.timedelta(seconds=-2) < age < datetime.timedelta(minutes=2), log["at_utc"])
        self.assertRegex(log["at_utc"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        self.assertEqual([row["action"] for row in log["episodes"][:-1]], replay.ACTIONS)
        first = log["episodes"][0]
        self.assertEqual(first["reset"]["data"]["observation"]["task_id"], "null")
        step = {"observation": {"task_id": "null"}, "reward": 0.5, "done": True}
        self.assertEqual(first["step"], {"type": "observation", "data": step})
        group = {"task_id": "null", "concurrent_group_rewards": [0.5] * 5, "ok": True}
        self.assertEqual(log["episodes"][-1], group)

    async def test_a_close_message_ends_each_episode(self) -> None:
        kinds: list[list[str]] = []

        async def handler(ws: ServerConnection) -> None:
            kinds.append(mine := [])
            with server.contextlib.suppress(server.ConnectionClosed):
                while True:
                    kind = json.loads(await ws.recv())["type"]
                    mine.append(kind)
                    data = {"observation": {}, "reward": 0.5, "done": kind == "step"}
                    await ws.send(json.dumps({"type": "observation", "data": data}))

        async with self.answered(handler) as url:
            self.assertEqual((await self.replay(url, self.log))[0], 0)
        self.assertEqual(kinds, [["reset", "step", "close"]] * 10)

    async def test_a_wrong_reward(self) -> None:
        async with self.served(one_task(lambda action: server.observation({}, 0.25, True))) as url:
            status, out, err = await self.replay(url, self.log)
        self.assertEqual((status, err), (1, []))
        for line in out[:-1]:
            self.assertTrue(line.startswith("FAIL null {"), line)
            self.assertIn("reward must be 0.5", line)
            self.assertIn('"reward": 0.25', line)
        self.assertIn("0 of 6 ok", out[-1])
        log = self.logged()
        self.assertFalse(log["all_ok"])
        self.assertEqual(log["episodes"][-1]["concurrent_group_rewards"], [0.25] * 5)
        self.assertIn("reward must be 0.5", log["episodes"][0]["error"])

    async def test_an_error(self) -> None:
        def step(action: dict[str, Any]) -> Any:
            if action:
                raise RuntimeError("boom\nFAIL \x1b[31m")
            return server.observation({}, 0.5, True)

        async with self.served(one_task(step)) as url:
            status, out, err = await self.replay(url, self.log)
        self.assertEqual((status, err, len(out)), (1, [], 7))
        self.assertTrue(out[0].startswith('FAIL null {"answer": "done"} -> step: '), out[0])
        self.assertIn('the reply must be {"type": "observation"', out[0])
        self.assertIn("EXECUTION_ERROR", out[0])
        self.assertIn("RuntimeError: boom", out[0])
        self.assertNotIn("\x1b", "".join(out))
        self.assertTrue(out[1].startswith("OK   null {} ->"), "one failure ends nothing")
        log = self.logged()
        self.assertEqual(log["episodes"][0]["step"]["data"]["code"], "EXECUTION_ERROR")
        self.assertEqual([row["ok"] for row in log["episodes"]], [False, True, False, False, False, False])

    async def test_an_episode_that_is_never_done(self) -> None:
        async with self.served(one_task(lambda action: server.observation({}, 0.5, False))) as url:
            status, out, _ = await self.replay(url, self.log)
        self.assertEqual(status, 1)
        self.assertIn("done must be true after the last action", out[0])
        self.assertFalse(any(row["ok"] for row in self.logged()["episodes"]))

    async def test_a_silent_server(self) -> None:
        async def step(action: dict[str, Any]) -> Any:
            await asyncio.Event().wait()

        async with self.served(one_task(step)) as url:
            status, out, err = await self.replay(url, self.log, "--timeout", 0.1)
        self.assertEqual((status, err, len(out)), (1, [], 7))
        for line in out[:-1]:
            self.assertRegex(line, "^FAIL null .*no answer in time.*--timeout")
        row = self.logged()["episodes"][0]
        self.assertEqual((row["reset"]["type"], row["step"]), ("observation", None))

    async def test_a_server_that_dies_half_way(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            played = 0

            def step(action: dict[str, Any]) -> dict[str, Any]:
                nonlocal played
                played += 1
                if played == 3:
                    running.close(close_connections=False)
                    for ws in running.connections:
                        ws.transport.abort()
                return server.observation({}, 0.5, True)

            running = await stack.enter_async_context(server.serve_episodes(one_task(step), host="127.0.0.1", port=0))
            url = f"127.0.0.1:{running.sockets[0].getsockname()[1]}"
            status, out, err = await self.replay(url, self.log)
        self.assertEqual((status, err, len(out)), (1, [], 7))
        self.assertEqual([line[:4] for line in out[:-1]], ["OK  ", "OK  ", "FAIL", "FAIL", "FAIL", "FAIL"])
        self.assertIn("step: no close frame received", out[2])
        self.assertIn("connect: ", out[3])
        log = self.logged()
        self.assertEqual([row["ok"] for row in log["episodes"]], [True, True, False, False, False, False])
        self.assertEqual((log["episodes"][3]["reset"], log["episodes"][3]["step"]), (None, None))
        self.assertEqual(log["episodes"][-1]["concurrent_group_rewards"], [None] * 5)

    async def test_an_action_that_is_too_long_for_the_server(self) -> None:
        """The server hangs up on it while most of it is still to be sent."""
        actions = [{"a": "x" * 17 * MIB}, {}]
        path = self.file({"task_ids": ["null"], "actions": actions, "reward": 0.5})
        async with self.served(server.null_episode) as url:
            status, out, err = await self.replay(url, self.log, "--episodes", path, "--group", 1)
        self.assertEqual((status, err, len(out)), (1, [], 4))
        self.assertEqual([line[:4] for line in out[:-1]], ["FAIL", "OK  ", "FAIL"])
        self.assertIn("1009", out[0])
        self.assertEqual([row["ok"] for row in self.logged()["episodes"]], [False, True, False])

    async def test_a_full_server_is_quoted(self) -> None:
        async with self.served(server.null_episode, max_sessions=1) as url:
            status, out, _ = await self.replay(url, self.log)
        self.assertEqual((status, [line[:4] for line in out[:-1]]), (1, ["OK  "] * 5 + ["FAIL"]))
        self.assertIn("CAPACITY_REACHED", out[5])

    async def test_nonsense_instead_of_replies(self) -> None:
        def reply(**changed: Any) -> str:
            return json.dumps(
                {"type": "observation", "data": {"observation": {}, "reward": 0.5, "done": True} | changed}
            )

        done = {"observation": {}, "reward": 0.5}
        table: list[tuple[str | bytes, str]] = [  # what comes instead of the step's reply, the rule that it breaks
            (reply().encode(), "must be JSON in a text frame"),
            (b"\xff\x00", "must be JSON in a text frame"),
            ("", "must be JSON in a text frame"),
            ("nonsense\n\x1b", "must be JSON in a text frame"),
            (reply() + reply(), "must be JSON in a text frame"),
            (reply(reward=float("nan")), "must be JSON in a text frame"),
            (reply().replace("0.5", "1e999"), "must be JSON in a text frame"),
            ("[" * 100_000, "must be JSON in a text frame"),
            ('{"type": "observation", "data": ' + "[" * 700 + "]" * 700 + "}", "must be"),
            ("9" * 5000, "must be JSON in a text frame"),
            ("[1]", 'must be {"type": "observation"'),
            ("null", 'must be {"type": "observation"'),
            ('"\\ud800"', 'must be {"type": "observation"'),
            ('{"type": "state", "data": {"step_count": 1}}', 'must be {"type": "observation"'),
            ('{"type": ["observation"], "data": {"done": true}}', 'must be {"type": "observation"'),
            ('{"type": "observation"}', 'must be {"type": "observation"'),
            ('{"type": "observation", "data": [1]}', 'must be {"type": "observation"'),
            ('{"type": "error", "data": "no"}', 'must be {"type": "observation"'),
            (reply(observation=[]), "observation must be an object"),
            (reply(reward="0.5"), "reward must be a number"),
            (reply(reward=[0.5]), "reward must be a number"),
            (json.dumps({"type": "observation", "data": {"observation": {}, "done": True}}), "reward must be a number"),
            (reply(done=1), "done must be true or false"),
            (reply(done="true"), "done must be true or false"),
            (json.dumps({"type": "observation", "data": done}), "done must be true or false"),
            (reply(reward=None), "reward must be 0.5"),
            (reply(reward=True), "reward must be 0.5"),
            (reply(reward=int("9" * 400)), "reward must be 0.5"),
        ]

        async def handler(ws: ServerConnection) -> None:
            with contextlib.suppress(server.ConnectionClosed):
                await ws.recv()
                await ws.send(reply(reward=None, done=False))
                await ws.send(table[json.loads(await ws.recv())["data"].get("number", 0)][0])
                await ws.wait_closed()

        episodes = self.file({"task_ids": ["t"], "actions": [{"number": n} for n in range(len(table))], "reward": 0.5})
        async with self.answered(handler) as url:
            status, out, err = await self.replay(url, self.log, "--episodes", episodes, "--timeout", 5)
        self.assertEqual((status, err, len(out)), (1, [], len(table) + 2))
        for line, (sent, rule) in zip(out, table, strict=False):
            with self.subTest(sent=sent[:60]):
                self.assertTrue(line.startswith("FAIL t {"), line)
                self.assertIn(rule, line)
                self.assertLess(len(line), 1000)
                self.assertTrue(line.isprintable())
        rows = self.logged()["episodes"]
        self.assertEqual(rows[3]["step"], "nonsense\n\x1b", "the log has the raw reply")
        self.assertEqual(rows[10]["step"], [1])

    def test_rewards_compared(self) -> None:
        for reward, expected, right in (
            ("0.5", 0.5, True),
            ("0.30000000000000004", 0.3, True),
            ("0.30000001192092896", 0.3, True),  # of a float32
            ("0.3001", 0.3, False),
            ("0.300001", 0.3, False),
            ("1", 1.0, True),
            ("1.0", 1, True),
            ("true", 1, True),
            ("1", True, True),
            ("false", 0.0, True),
            ("2", 1, False),
            ("1000000000000001", 1000000000000000, False),
            ("0", None, True),
            ("0.25", None, True),
            ("true", None, True),
            ("null", None, False),
            ("null", 0, False),
        ):
            with self.subTest(reward=reward, expected=expected):
                text = f'{{"type": "observation", "data": {{"observation": {{}}, "reward": {reward}, "done": true}}}}'
                reply, seen, broken = replay.judge(text, True, expected)
                self.assertEqual((reply, seen), (json.loads(text), json.loads(reward)))
                self.assertEqual(not broken, right, broken)
                if not right:
                    self.assertIn("a number" if expected is None else json.dumps(expected), broken)

    async def test_episodes_of_several_steps(self) -> None:
        a = {"answer": "a"}
        episodes = {"task_ids": ["x", "y"], "actions": [[a, {}, a], [a, a], [a, a, a, a], a], "reward": 0.5}
        async with self.served(counting(3)) as url:
            status, out, _ = await self.replay(url, self.log, "--episodes", self.file(episodes))
        self.assertEqual((status, len(out)), (1, 10))
        self.assertEqual(
            [line[:6] for line in out[:-1]], ["OK   x", *["FAIL x"] * 3, "OK   y", *["FAIL y"] * 3, "OK   x"]
        )
        self.assertIn("done must be true after the last action", out[1])
        self.assertIn("done must be false before the last action", out[2])
        self.assertIn("done must be true after the last action", out[3])
        rows = self.logged()["episodes"]
        self.assertEqual([row["action"] for row in rows[:4]], episodes["actions"])
        self.assertEqual([reply["data"]["done"] for reply in rows[0]["step"]], [False, False, True])
        self.assertEqual([reply["data"]["observation"]["count"] for reply in rows[2]["step"]], [1, 2, 3])
        self.assertEqual(rows[3]["step"]["data"]["observation"], {"count": 1})
        self.assertEqual(rows[-1]["concurrent_group_rewards"], [0.5] * 5)

    async def test_a_reset_that_is_done(self) -> None:
        new = {"reset": lambda data: server.observation({}, done=True), "step": lambda action: server.observation({})}
        async with self.served(lambda: new) as url:
            status, out, _ = await self.replay(url, self.log)
        self.assertEqual(status, 1)
        self.assertIn("-> reset: done must be false before the last action", out[0])

    async def test_the_group_plays_at_once(self) -> None:
        barrier, played = asyncio.Barrier(7), 0
        episodes = {"task_ids": ["t"], "actions": [{}], "reward": 0.5}

        async def step(action: dict[str, Any]) -> dict[str, Any]:
            nonlocal played
            played += 1
            if played > 1:  # after the single one, nobody goes on before all have come
                await barrier.wait()
            return server.observation({}, 0.5, True)

        async with self.served(one_task(step)) as url:
            self.assertEqual((await self.replay(url, self.log, "--episodes", self.file(episodes), "--group", 7))[0], 0)
        self.assertEqual(self.logged()["episodes"][-1]["concurrent_group_rewards"], [0.5] * 7)

    async def test_rounds(self) -> None:
        async with self.served(server.null_episode) as url:
            status, out, err = await self.replay(url, self.log, "--rounds", 20, "--group", 3)
        self.assertEqual((status, err, len(out)), (0, [], 9), "no progress line where stdout is no terminal")
        for line, kind in zip(out[6:8], ("reset", "step"), strict=True):
            found = re.match(rf"{kind}: p50 (\S+), p99 (\S+), max (\S+) ms; (\S+) episodes/s$", line)
            self.assertTrue(found, line)
            p50, p99, most, rate = map(float, found.groups())  # type: ignore[union-attr]
            self.assertTrue(0 < p50 <= p99 <= most and rate > 0, line)
        self.assertEqual(len(self.logged()["episodes"]), 6, "one row for all rounds")

    async def test_the_first_round_that_failed_is_logged(self) -> None:
        played = 0

        def step(action: dict[str, Any]) -> dict[str, Any]:
            nonlocal played
            played += 1
            return server.observation({}, {8: 0.25, 12: 0.125}.get(played, 0.5), True)

        async with self.served(one_task(step)) as url:
            status, out, _ = await self.replay(url, self.log, "--rounds", 5, "--group", 2)
        self.assertEqual((status, len(out)), (1, 9))
        self.assertTrue(out[5].startswith("FAIL null"), out[5])
        rows = self.logged()["episodes"]
        self.assertEqual(sorted(rows[-1]["concurrent_group_rewards"]), [0.25, 0.5])
        self.assertEqual(len(rows), 6)

    async def test_a_terminal_shows_progress(self) -> None:
        ours, theirs = pty.openpty()
        self.addCleanup(os.close, ours)
        async with self.served(server.null_episode) as url:
            process = await self.start(url, self.log, "--rounds", 3, stdout=theirs)
            os.close(theirs)
            await process.communicate()
        self.assertEqual(process.returncode, 0)
        shown = os.read(ours, 2**16).decode()
        self.assertIn("round 3 of 3\r", shown)


class ReplayAndServers(ReplayCase):
    """Where the server is, and where there is none."""

    async def test_addresses(self) -> None:
        async with self.served(server.null_episode) as url:
            port = url.rpartition(":")[2]
            for given, meant in (
                (f"{url}/", f"ws://{url}/ws"),
                (f"http://{url}", f"ws://{url}/ws"),
                (f"ws://{url}/ws/", f"ws://{url}/ws"),
                (f"HTTP://localhost:{port}?x=/y", f"ws://localhost:{port}/ws?x=/y"),
            ):
                with self.subTest(given=given):
                    self.assertEqual((await self.replay(given, self.log, "--group", 1))[0], 0)
                    self.assertEqual(self.logged()["url"], meant)

    async def test_proxies_are_for_other_machines(self) -> None:
        asked: asyncio.Queue[bytes] = asyncio.Queue()

        async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.put_nowait(await reader.readline())
            writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            writer.close()

        async with self.served(server.null_episode) as url, self.raw(proxy) as address:
            env = dict.fromkeys(("http_proxy", "https_proxy", "ws_proxy"), f"http://{address}")
            port = url.rpartition(":")[2]
            for host in ("127.0.0.1", "localhost"):
                self.assertEqual((await self.replay(f"ws://{host}:{port}", self.log, env=env))[0], 0)
            self.assertTrue(asked.empty(), "loopback needs no proxy")
            status, out, err = await self.replay("ws://server.invalid:1234", self.log, env=env)
            self.assertEqual(asked.get_nowait(), b"CONNECT server.invalid:1234 HTTP/1.1\r\n")
            self.assertEqual((status, out, len(err)), (2, [], 1))
            self.assertIn("proxy", err[0])

    async def test_no_server(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        status, out, err = await self.replay(f"ws://127.0.0.1:{port}", self.log)
        self.assertEqual((status, out, len(err)), (2, [], 1))
        self.assertRegex(err[0], f"no environment server at ws://127.0.0.1:{port}/ws: .*does the server run.*--wait")
        log = self.logged()
        self.assertEqual((log["url"], log["episodes"], log["all_ok"]), (f"ws://127.0.0.1:{port}/ws", [], False))

    async def test_no_environment_server(self) -> None:
        def http(answer: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
            async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                with contextlib.suppress(ConnectionError):
                    await reader.readline()
                    writer.write(answer)
                    await writer.drain()
                writer.close()

            return handler

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        empty = b"Content-Length: 0\r\n\r\n"
        table = [
            (http(b"HTTP/1.1 %d X\r\n" % code + empty), f"HTTP {code}: is it an env") for code in (200, 403, 404, 426)
        ]
        table += [
            (http(b"HTTP/1.1 302 X\r\nLocation: https://a.invalid/\r\n" + empty), "a.invalid"),
            (http(b"SSH-2.0-OpenSSH_9.2\r\n" * 3), "is it an environment server"),
            (http(b"\xff" * 100_000), "is it an environment server"),
            (http(b""), "is it an environment server"),
            (silent, "no answer in time"),
            (http(b"HTTP/1.1 400 X\r\n\r\n"), "wss:// needs TLS"),
        ]

        async def refused(handler: Any, hint: str) -> None:
            async with self.raw(handler) as url, some:
                scheme = "wss" if "TLS" in hint else "ws"
                status, out, err = await self.replay(f"{scheme}://{url}", os.devnull, "--timeout", 1)
            self.assertEqual((status, out, len(err)), (2, [], 1), hint)
            self.assertIn(hint, err[0])

        some = asyncio.Semaphore(3)
        await asyncio.gather(*(refused(*row) for row in table))

    async def test_tokens(self) -> None:
        async with self.served(server.null_episode, token="s3cret") as url:
            for env in ({}, {"SERVER_TOKEN": "wr0ng"}):
                status, out, err = await self.replay(url, self.log, env=env)
                self.assertEqual((status, out, len(err)), (2, [], 1))
                self.assertRegex(err[0], "401.*SERVER_TOKEN")
                self.assertNotIn("wr0ng", err[0])
            status, out, err = await self.replay(url, self.log, env={"SERVER_TOKEN": "s3cret"})
            self.assertEqual((status, err), (0, []))
            self.assertNotIn("s3cret", "".join(out) + self.log.read_text())
        for token in ("", "s3cret\n", "s3 cret", "s3cr\u00e9t"):
            with unittest.mock.patch.dict("os.environ", {"SERVER_TOKEN": token}):
                err = self.refused()
            self.assertIn("SERVER_TOKEN must be", err)
            self.assertNotIn("s3", err)

    async def test_wait_for_a_server_that_starts_late(self) -> None:
        knocked = asyncio.Event()

        async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.abort()
            knocked.set()

        async with self.raw(early) as url:
            process = await self.start(url, self.log, "--wait", 30)
            async with asyncio.timeout(20):
                await knocked.wait()
        self.assertIsNone(process.returncode)
        async with server.serve_episodes(server.null_episode, host="127.0.0.1", port=int(url.rpartition(":")[2])):
            async with asyncio.timeout(20):
                out, err = await process.communicate()
        self.assertEqual((process.returncode, err), (0, b""))
        self.assertIn(b"6 of 6 ok", out)
        self.assertTrue(self.logged()["all_ok"])

    async def test_a_wait_ends(self) -> None:
        knocks, again = 0, asyncio.Event()

        async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal knocks
            knocks += 1
            if knocks > 1:
                again.set()
            writer.transport.abort()

        async with self.raw(early) as url:
            status, out, err = await self.replay(url, self.log, "--wait", 0.5)
            self.assertEqual((status, out, len(err)), (2, [], 1))
            self.assertGreater(knocks, 1)
            knocks, again = 0, asyncio.Event()
            process = await self.start(url, self.log, "--wait", 30)
            async with asyncio.timeout(20):
                await again.wait()
                process.send_signal(signal.SIGINT)
                _, text = await process.communicate()
        self.assertEqual((process.returncode, text), (130, b""))
        self.assertEqual(self.logged()["episodes"], [])


class ReplayCommandLine(ReplayCase):
    """Options, files and signals."""

    def test_wrong_use(self) -> None:
        good = {"task_ids": ["t"], "actions": [{}], "reward": 1}
        wrong: list[Any] = [
            "",
            "nonsense",
            b"\xff",
            "[" * 100_000,
            [],
            {},
            {**good, "rewards": 1},
            {**good, "reward": "1"},
        ]
        wrong += [{**good, "reward": float("nan")}, {"task_ids": ["t"], "actions": [{}]}]
        wrong += [{**good, "task_ids": value} for value in ([], "t", [1], [["t"]], ["t", None])]
        wrong += [{**good, "actions": value} for value in ([], {}, "a", [1], [[]], [{}, [{}, 1]], [[[{}]]])]
        files = [("--episodes", self.file(content)) for content in wrong] + [("--episodes", self.directory / "missing")]
        options: list[tuple[Any, ...]] = [("--group", 0), ("--group", 1.5), ("--rounds", 0), ("--timeout", 0)]
        options += [("--timeout", "nan"), ("--wait", -1), ("--wait", "soon"), ("--what",), ("a", "b", "c")]
        options += [(url,) for url in ("ftp://x", "ws://", "ws://127.0.0.1:99999", "ws://[::1", "ws://x#y", "")]
        errors = []
        for args in options + files:
            with self.subTest(args=args):
                errors.append(self.refused(*args))
                self.assertIn(str(args[0]), errors[-1])
        for line, name in zip(errors, ("group", "group", "rounds", "timeout", "timeout", "wait"), strict=False):
            self.assertRegex(line, f"--{name}(: invalid int value| must be from )")
        for error in errors[len(options) + 4 : -1]:
            self.assertRegex(error, r'it must be {"task_ids": .*}; it is |not JSON compliant')
        self.assertIn("No such file", errors[-1])

    async def test_episodes_from_a_file(self) -> None:
        episodes = {"task_ids": ["a", "b"], "actions": [{"x": [1, None, "\u4f60\ud800"]}], "reward": None}
        path = self.file(b"\xef\xbb\xbf" + json.dumps(episodes).encode())
        async with self.served(counting(1, True)) as url:
            status, out, err = await self.replay(url, self.log, "--episodes", path, "--group", 1)
        self.assertEqual((status, err, len(out)), (0, [], 4))
        self.assertIn("\u4f60\\ud800", out[0])
        rows = self.logged()["episodes"]
        self.assertEqual([row["task_id"] for row in rows], ["a", "b", "a"])
        self.assertEqual(rows[1]["action"], episodes["actions"][0])
        self.assertEqual(rows[2]["concurrent_group_rewards"], [True])
        async with self.served(counting(1, None)) as url:
            status, out, _ = await self.replay(url, self.log, "--episodes", path)
        self.assertEqual(status, 1)
        self.assertIn("reward must be a number", out[0])

    async def test_a_log_that_cannot_be_written(self) -> None:
        sessions = []

        def new_episode() -> server.Environment:
            sessions.append(1)
            return server.null_episode()

        (self.directory / "file").write_text("")
        async with self.served(new_episode) as url:
            for path in ("missing/log.json", ".", "", "file/log.json", "x" * 300):
                status, out, err = await self.replay(url, path)
                self.assertEqual((status, out, len(err)), (2, [], 1), path)
                self.assertTrue(err[0].startswith(f"replay.py: error: LOG {path}: "), err)
            self.assertEqual(sessions, [], "it is told before the first episode")

    async def test_the_log_is_written_whole_or_not_at_all(self) -> None:
        self.log.write_text("older")
        os.chmod(self.log, 0o644)
        (self.directory / "link").symlink_to(self.log)

        def limit() -> None:  # as on a full disk: the write fails in its middle
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

        async with self.served(server.null_episode) as url:
            status, out, err = await self.replay(url, self.log, preexec_fn=limit)
            self.assertEqual((status, len(out), len(err)), (2, 6, 1))
            self.assertTrue(err[0].startswith(f"replay.py: error: LOG {self.log}: "), err)
            self.assertEqual(self.log.read_text(), "older")
            self.assertEqual((await self.replay(url, "link"))[0], 0)
            self.assertTrue((self.directory / "link").is_symlink())
            self.assertTrue(self.logged()["all_ok"])
            umask = os.umask(0o022)
            os.umask(umask)
            self.assertEqual(stat.S_IMODE(self.log.stat().st_mode), 0o666 & ~umask, "others may read it")

    async def test_devices_as_a_log(self) -> None:
        async with self.served(server.null_episode) as url:
            self.assertEqual((await self.replay(url, os.devnull))[0], 0)
            self.assertTrue(stat.S_ISCHR(os.stat(os.devnull).st_mode))
            status, out, _ = await self.replay(url, "/dev/stdout")
            self.assertEqual((status, '"all_ok": true' in "".join(out)), (0, True))
            if os.path.exists("/dev/full"):
                status, _, err = await self.replay(url, "/dev/full")
                self.assertEqual((status, len(err)), (2, 1))
                self.assertIn("No space left", err[0])
                self.assertTrue(stat.S_ISCHR(os.stat("/dev/full").st_mode))

    async def test_output_that_nobody_reads(self) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        self.addCleanup(os.close, writing)
        outputs = [writing]
        if os.path.exists("/dev/full"):
            outputs.append(os.open("/dev/full", os.O_WRONLY))
            self.addCleanup(os.close, outputs[1])
        async with self.served(server.null_episode) as url:
            for output in outputs:
                self.log.unlink(missing_ok=True)
                process = await self.start(url, self.log, stdout=output)
                _, err = await process.communicate()
                self.assertEqual((process.returncode, err), (0, b""))
                self.assertEqual(len(self.logged()["episodes"]), 6)

    async def test_an_output_without_unicode(self) -> None:
        path = self.file(json.dumps({"task_ids": ["\u4f60"], "actions": [{}], "reward": None}))
        async with self.served(counting(1)) as url:
            env = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
            status, out, err = await self.replay(url, self.log, "--episodes", path, env=env)
        self.assertEqual((status, err, len(out)), (0, [], 3))
        self.assertIn("OK   \\u4f60 {}", out[0])

    async def test_ctrl_c(self) -> None:
        entered = asyncio.Event()

        async def step(action: dict[str, Any]) -> dict[str, Any]:
            if not action:  # the second one of the examples
                entered.set()
                await asyncio.Event().wait()
            return server.observation({}, 0.5, True)

        async with self.served(one_task(step)) as url:
            for number in (signal.SIGINT, signal.SIGTERM):
                entered.clear()
                process = await self.start(url, self.log)
                async with asyncio.timeout(20):
                    await entered.wait()
                    process.send_signal(number)
                    out, err = await process.communicate()
                self.assertEqual((process.returncode, err), (130, b""))
                self.assertIn(b"1 of 1 ok, interrupted", out)
                log = self.logged()
                self.assertEqual(([row["ok"] for row in log["episodes"]], log["all_ok"]), ([True], False))
                self.log.unlink()
        self.assertEqual(list(self.directory.iterdir()), [])

    async def test_ctrl_c_in_a_soak(self) -> None:
        played, enough = 0, asyncio.Event()

        def step(action: dict[str, Any]) -> dict[str, Any]:
            nonlocal played
            played += 1
            if played == 50:
                enough.set()
            return server.observation({}, 0.5, True)

        async with self.served(one_task(step)) as url:
            process = await self.start(url, self.log, "--rounds", 10**6)
            async with asyncio.timeout(20):
                await enough.wait()
                process.send_signal(signal.SIGINT)
                out, err = await process.communicate()
        self.assertEqual((process.returncode, err), (130, b""))
        self.assertIn(b" episodes/s", out)
        self.assertEqual(len(self.logged()["episodes"]), 6)
