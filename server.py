# SPDX-License-Identifier: 0BSD
"""A complete environment server for the reinforcement learning of language models, in one file.

A trainer connects to /ws and sends `reset`, `step`, `state` and `close`; observations, rewards and `done` come back, as
in OpenEnv's protocol. One socket is one session: it has an environment of its own, plays episodes one after the other,
and shares nothing with other sockets. To make it yours, replace `null_episode` and the constants around it.
"""

import argparse
import asyncio
import contextlib
import hmac
import json
import logging
import multiprocessing.connection
import os
import re
import resource
import signal
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from traceback import format_exception_only
from types import NoneType
from typing import Any, cast

try:
    from websockets.asyncio.server import Server, ServerConnection, broadcast, serve
    from websockets.exceptions import ConnectionClosed
    from websockets.http11 import Request, Response
    from websockets.protocol import State
    from websockets.version import version

    if version < "17":
        raise ImportError
except ImportError:
    raise SystemExit("this needs Python 3.11 and websockets 17: pip install 'websockets>=17,<18'") from None

__version__ = "1.0.0"
Environment = dict[str, Callable[..., Any]]
log = logging.getLogger("server")

# ---- The environment: what an author replaces ------------------------------------------------------------------------

METADATA = {"name": "null", "description": "Any action ends the episode with reward 0.5.", "version": "1.0.0"}
TASKS = {"null": "Send any action: it ends the episode with reward 0.5."}  # task_id: prompt
SCHEMA = {"action": {"type": "object"}, "observation": {"type": "object"}, "state": {"type": "object"}}  # JSON Schemas


class Invalid(Exception):
    """`raise Invalid("what would be right", "data", "key")` refuses a task or an action with VALIDATION_ERROR."""

    def __init__(self, message: str, *loc: str) -> None:
        super().__init__(str(message), *map(str, loc))


def observation(fields: dict[str, Any], reward: Any = None, done: bool = False, metadata: Any = None) -> dict[str, Any]:
    """What `reset` and `step` return: `fields` and `metadata` are dicts, `reward` is a number, a bool or None.

    What has `tolist()`, as NumPy's arrays and scalars and all tensors do, may stand for a list or a number anywhere.
    """
    reward = reward.tolist() if hasattr(reward, "tolist") else reward
    result = {"observation": fields, "reward": reward, "done": bool(done)}
    return result | {"metadata": dict(metadata)} if metadata else result


def null_episode() -> Environment:
    """Makes one socket's environment: its handlers `reset` and `step`, and where it has them `state` and `close`.

    `reset(data)` gets the request's data, `step(action)` the action, and both return `observation(...)`; `state()`
    returns a dict to be added to the session's own; `close()` runs once, however the socket ends. Each may be `async`.
    One that blocks would hold up every session: let it `return await asyncio.to_thread(function, ...)`.
    """
    task_id: str | None = None

    def reset(data: dict[str, Any]) -> dict[str, Any]:
        nonlocal task_id
        wanted = "null" if data.get("task_id") is None else data["task_id"]
        if wanted not in TASKS:
            raise Invalid(f"unknown task_id {wanted!r:.80}; known: {', '.join(TASKS)}", "data", "task_id")
        task_id = wanted
        return observation({"task_id": task_id, "prompt": TASKS[task_id]})

    def step(action: dict[str, Any]) -> dict[str, Any]:
        return observation({"task_id": task_id}, reward=0.5, done=True)

    def state() -> dict[str, Any]:
        return {"task_id": task_id}

    return {"reset": reset, "step": step, "state": state}


EPISODE = null_episode  # what `python server.py` serves

# ---- The messages: JSON objects, strict in both directions -----------------------------------------------------------

KEYS = {"reset": {"type", "data"}, "step": {"type", "data"}, "state": {"type"}, "close": {"type"}}
encode = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=lambda value: value.tolist()).encode


class Refused(Exception):
    """`Refused(code, message)` becomes the error reply with that code."""


def error(code: str, message: str, **details: Any) -> str:
    """An error reply."""
    return encode({"type": "error", "data": {"message": message, "code": code, **details}})


def refuse(constant: str) -> None:
    """Keeps Python from reading NaN and Infinity (RFC 8259, section 6)."""
    raise ValueError(f"{constant} is no JSON number")


decode = json.JSONDecoder(parse_constant=refuse).decode


def describe(exc: BaseException) -> str:
    """The type and the text of an exception, even of one whose `str()` fails."""
    return "".join(format_exception_only(exc)).strip()


def read(message: str | bytes) -> tuple[str, dict[str, Any]]:
    """The type and the data of a request. Raises Refused, or Invalid with the path of the wrong value."""
    try:
        request = decode(message if isinstance(message, str) else message.decode())
    except (ValueError, RecursionError) as exc:
        raise Refused("INVALID_JSON", f'not JSON: {exc}. Send one object such as {{"type": "reset"}}') from None
    if not isinstance(request, dict):
        raise Invalid(f'a message must be an object such as {{"type": "reset"}}, not a {type(request).__name__}')
    kind = request.get("type")
    if not isinstance(kind, str) or kind not in KEYS:
        shown = repr(kind)[:80] if isinstance(kind, str) else "no string"
        raise Refused("UNKNOWN_TYPE", f"type must be one of {', '.join(KEYS)}; it is {shown}")
    if stray := request.keys() - KEYS[kind]:
        raise Invalid(f"unknown key {min(stray)!r:.80}: {kind} has only {' and '.join(KEYS[kind])}", min(stray))
    data = request.get("data", None if kind == "step" else {})
    if not isinstance(data, dict):
        raise Invalid(f"{kind} needs data that is an object", "data")
    if kind == "reset":
        task_id, seed, episode_id = data.get("task_id"), data.get("seed"), data.get("episode_id")
        if not (task_id is None or isinstance(task_id, str)):
            raise Invalid("task_id must be a string or null", "data", "task_id")
        if not (seed is None or type(seed) is int and seed >= 0):
            raise Invalid("seed must be an integer >= 0 or null", "data", "seed")
        if not (episode_id is None or isinstance(episode_id, str) and len(episode_id) <= 255):
            raise Invalid("episode_id must be a string of at most 255 characters or null", "data", "episode_id")
    return kind, data


# ---- The session: one socket, its environment, and the books of its episodes -----------------------------------------

RESTART = 1001, "the server is restarting"  # close code and reason
LARGE = 2**16  # bytes; of larger frames one may wait for a session, of smaller ones 256: no more than one long message
GONE = 100_000  # milliseconds without a TCP acknowledgment after which the kernel takes the client's host for dead
USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", 0)  # the option for it, where the platform has it
Sessions = dict[asyncio.Task[Any], Callable[[], tuple[ServerConnection, bool, float]]]


async def session(ws: ServerConnection, environment: Environment, sessions: Sessions, draining: asyncio.Event) -> None:
    """Answers one request after the other until the socket ends, however it ends; then runs the environment's `close`.

    While it lasts, `sessions` maps its task to a function that returns the socket, whether an episode is running, and
    since when (in the loop's time) the session has been waiting for its client; infinite while it is not.
    """
    episode_id: str | None = None
    played, running, step_count, patient, farewell = False, False, 0, False, RESTART
    loop, task = asyncio.get_running_loop(), cast("asyncio.Task[None]", asyncio.current_task())
    waiting_since = loop.time()

    async def call(handler: str, *args: Any) -> Any:
        result = environment[handler](*args)
        return await result if hasattr(result, "__await__") else result

    async def reply_to(message: str | bytes) -> str | None:
        nonlocal episode_id, played, running, step_count, farewell
        kind, data = read(message)
        if kind == "close":
            farewell = 1000, ""
        if kind == "close" or (kind == "reset" and draining.is_set()):
            return None
        if kind == "state":
            if played and episode_id is None:
                episode_id = str(uuid.uuid4())
            books = {"episode_id": episode_id, "step_count": step_count, "done": played and not running}
            return encode({"type": "state", "data": books | await call("state") | books})
        if kind == "step" and not running:
            raise Refused("EXECUTION_ERROR", "no episode is running: send reset first")
        given = data.get("episode_id")
        result = await call(kind, data)
        get = result.get if isinstance(result, dict) else {}.get
        fields, reward, done = get("observation"), get("reward", ""), get("done")
        if not (isinstance(fields, dict) and isinstance(reward, (int, float, NoneType)) and isinstance(done, bool)):
            raise TypeError(f"{kind} must return observation(dict, reward=number, done=bool), not {result!r:.200}")
        reply = encode({"type": "observation", "data": result})
        if kind == "reset":  # nothing can fail any more: now the books change
            episode_id, step_count = given, -1
        played, running, step_count = True, not done, step_count + 1
        return reply

    for part in ws.request, ws.response:
        if part:
            part.headers.clear()  # 3 kB that nobody reads any more
    sessions[task] = lambda: (ws, running, waiting_since)
    ws.connection_lost_waiter.add_done_callback(lambda _: task.cancel() if waiting_since == float("inf") else None)
    try:
        while ws.state is State.OPEN and (running or not draining.is_set()):
            message = await ws.recv()
            waiting_since = float("inf")
            try:
                reply = await reply_to(message)
            except Invalid as exc:
                reply = error("VALIDATION_ERROR", exc.args[0], errors=[{"loc": exc.args[1:], "msg": exc.args[0]}])
            except Refused as exc:
                reply = error(*exc.args)
            except BaseException as exc:  # model-written code raises anything, such as SystemExit by exit()
                if isinstance(exc, asyncio.CancelledError) and (ws.connection_lost_waiter.done() or draining.is_set()):
                    raise
                while task.uncancel():  # a TaskGroup of Python 3.11 leaves its cancellation behind
                    pass
                log.exception("the environment failed")
                reply = error("EXECUTION_ERROR", describe(exc))
            waiting_since = loop.time()
            if reply is None:
                break
            unread = len(reply) > LARGE or ws.transport.get_write_buffer_size() > 0
            if USER_TIMEOUT and patient != unread and not ws.transport.is_closing():
                patient = unread  # by a paused client, whose TCP window is then closed: that is no absence
                sock = ws.transport.get_extra_info("socket")
                sock.setsockopt(socket.IPPROTO_TCP, USER_TIMEOUT, 0 if patient else GONE)
            broadcast((ws,), reply)  # as `send` does, but for a context manager that costs as much as reading JSON
            del message, reply  # a session that waits holds neither
            await ws.drain()
    except (ConnectionClosed, asyncio.CancelledError):
        while task.uncancel():  # it was cancelled if the client left in the middle of a step
            pass
    finally:
        try:
            await call("close")
        except asyncio.CancelledError:
            pass  # by its own `task.cancel(); await task`, or by the end of the event loop
        except BaseException:
            log.exception("the environment's close failed")
        finally:
            del sessions[task]
    if not ws.connection_lost_waiter.done():
        await ws.close(*farewell)


# ---- The HTTP pages --------------------------------------------------------------------------------------------------

PATHS = ("/", "/health", "/metadata", "/schema", "/openapi.json", "/ws")
ABOUT = f"{METADATA['name']}: {METADATA['description']} Episodes are played on /ws. Paths: {' '.join(PATHS)}\n"
OPENAPI = {
    "openapi": "3.1.0",
    "info": {"title": METADATA["name"], "version": "1.0.0"},
    "paths": {path: {"get": {"responses": {"200": {"description": "OK"}}}} for path in PATHS},
}


def respond(
    ws: ServerConnection, request: Request, count: Callable[[], dict[str, int]], token: str | None
) -> Response | None:
    """The answer to an HTTP request, or None where `websockets` is to go on with the opening handshake."""
    path, status, name, value = request.path.partition("?")[0], 200, "Cache-Control", "no-store"
    known = token is None
    if token is not None:
        scheme, _, given = " ".join(request.headers.get_all("Authorization")).partition(" ")
        known = scheme.lower() == "bearer" and hmac.compare_digest(given.encode("latin-1"), token.encode())
    body: Any = "Only GET and HEAD; reset and step are messages on the WebSocket /ws.\n"
    if not known and path != "/health":
        status, body, name, value = 401, "Send the header Authorization: Bearer TOKEN.\n", "WWW-Authenticate", "Bearer"
    elif path not in PATHS:
        status, body = 404, f"Nothing here, only {' '.join(PATHS)}; reset and step are messages on /ws.\n"
    elif request.method not in ("GET", "HEAD"):
        status, name, value = 405, "Allow", "GET, HEAD"
    elif path != "/ws":
        health, metadata = {"status": "healthy", **count()}, METADATA | {"server_version": __version__}
        pages = {"/": ABOUT, "/health": health, "/metadata": metadata, "/schema": SCHEMA, "/openapi.json": OPENAPI}
        body = pages[path]
    elif request.method == "GET":
        return None
    else:
        status, name, value = 426, "Upgrade", "websocket"
    response = ws.respond(status, body if isinstance(body, str) else encode(body))
    response.headers[name] = value
    if not isinstance(body, str):
        del response.headers["Content-Type"]
        response.headers["Content-Type"] = "application/json"
    if request.method == "HEAD":
        response.body = b""
    return response


# ---- The server ------------------------------------------------------------------------------------------------------

# Options of each connection, where the platform has them. Keepalive probes are for where there is no user timeout; what
# the kernel cannot send yet is kept out of it by the last one, so that `get_write_buffer_size` tells what is unread.
TCP = {
    "TCP_USER_TIMEOUT": GONE,
    "TCP_KEEPIDLE": 60,  # seconds
    "TCP_KEEPALIVE": 60,  # the name on macOS
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 4,
    "TCP_NOTSENT_LOWAT": LARGE,
}


class Connection(ServerConnection):
    """The library's connection, with the answers to bad clients that websockets 17.4 does not have."""

    rest = b""

    def data_received(self, data: bytes) -> None:
        if self.response:
            return super().data_received(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > 2**13:  # too long for the library, which says so
            lines, self.rest = [*lines, self.rest], b""
        for line in lines:  # without those that announce a body, and without the body: the library would hang up
            if not (self.request or line.lower().startswith((b"content-length:", b"transfer-encoding:"))):
                super().data_received(line + b"\n")

    def process_event(self, event: Any) -> None:
        if self.protocol.close_expected():  # nobody reads any more
            return
        super().process_event(event)
        if self.response and len(event.data) > LARGE:
            self.recv_messages.paused = True
            self.transport.pause_reading()

    def pause_writing(self) -> None:  # the client does not read: answers to what it sends, such as pings, would pile up
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.recv_messages.paused:
            self.transport.resume_reading()

    def drain(self) -> Coroutine[Any, Any, None]:
        if not self.protocol.close_expected():
            return super().drain()
        self.transport.resume_reading()  # the client's close frame ends the wait, or else `close_timeout`
        return asyncio.sleep(0)


@contextlib.asynccontextmanager
async def serve_episodes(
    new_episode: Callable[[], Environment],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_sessions: int = 1000,
    idle_timeout: float = 3600,
    drain_timeout: float = 0,
    allow_origins: Iterable[Any] = (),
    token: str | None = None,
    **options: Any,
) -> AsyncIterator[Server]:
    """Serves environments: `async with serve_episodes(null_episode, host="127.0.0.1", port=0) as running:`.

    `running.sockets` tells the port, other `options` go to `websockets.serve`, times are in seconds. At the end of the
    block it accepts no more, gives running episodes `drain_timeout`, and closes the rest with 1001. Raises OSError if
    it cannot listen.
    """
    sessions: Sessions = {}
    draining, loop = asyncio.Event(), asyncio.get_running_loop()

    def count() -> dict[str, int]:
        return {"active_sessions": len(sessions), "max_sessions": max_sessions}

    async def handler(ws: ServerConnection) -> None:
        if len(sessions) >= max_sessions:
            reply, code = error("CAPACITY_REACHED", "all sessions are in use: try again later", **count()), 1013
        else:
            try:
                environment: Environment = {"state": dict, "close": dict, **new_episode()}
            except BaseException as exc:
                log.exception("the environment could not be made")
                reply, code = error("FACTORY_ERROR", f"no environment: {describe(exc)}"), 1011
            else:
                return await session(ws, environment, sessions, draining)
        with contextlib.suppress(ConnectionClosed):
            await ws.send(reply)
        await ws.close(code)

    async def close_where(chosen: Callable[[bool, float], bool], code: int, reason: str) -> None:
        status = [status() for status in sessions.values()]
        await asyncio.gather(*(ws.close(code, reason) for ws, running, since in status if chosen(running, since)))

    async def close_idle() -> None:
        while idle_timeout:
            await asyncio.sleep(min(idle_timeout / 4, 15))
            reason = f"no message for {idle_timeout:g} s"
            await close_where(lambda _, since: loop.time() - since > idle_timeout, 1001, reason)

    server = await serve(
        handler,
        host,
        port,
        process_request=lambda ws, request: respond(ws, request, count, token),
        origins=[None, *allow_origins],
        create_connection=Connection,
        compression=None,
        max_size=2**24,  # bytes; a longer message closes its own socket with 1009
        max_queue=256,
        write_limit=2 * LARGE,
        ping_timeout=None,  # a trainer in its optimizer step answers no ping; the kernel tells which hosts are gone
        close_timeout=5,
        backlog=1024,
        start_serving=False,
        **options,
    )
    for sock in server.sockets:  # what it accepts inherits this
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in TCP.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    await server.start_serving()
    watcher = asyncio.create_task(close_idle())
    try:
        yield server
    finally:
        log.info("draining: %d sessions, %g s for their episodes", len(sessions), drain_timeout)
        draining.set()
        watcher.cancel()
        server.close(close_connections=False)
        idle = close_where(lambda running, since: not running and since < float("inf"), *RESTART)
        tasks = [asyncio.create_task(idle), *sessions]
        try:
            await asyncio.wait(tasks, timeout=drain_timeout)
            await close_where(lambda running, since: True, *RESTART)
            await asyncio.wait(tasks, timeout=5)
        finally:  # also at a second signal, which cancels this
            for ws in server.all_connections:
                if not ws.connection_lost_waiter.done():
                    ws.transport.abort()
            await asyncio.wait(tasks, timeout=1)
            log.info("drained")


# ---- The command line ------------------------------------------------------------------------------------------------


async def run(settings: dict[str, Any]) -> None:
    """Serves until a signal: the first one drains, a second one ends it now."""
    loop, task, stop = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
    parent = multiprocessing.parent_process()  # of a worker

    def on_signal() -> None:
        if stop.is_set() and task:
            loop.call_soon(task.cancel)  # after `stop.wait()`, also when both signals come at once
        stop.set()

    quiet_until = 0.0

    def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal quiet_until
        if not re.search("out of system resource|_start_serving", context["message"]):
            loop.default_exception_handler(context)
        elif loop.time() > quiet_until:  # asyncio reports each connection that waits, every second
            quiet_until = loop.time() + 10
            log.error("out of file descriptors: new connections wait until sessions end")

    loop.set_exception_handler(on_error)
    loop.add_signal_handler(signal.SIGTERM, on_signal)
    loop.add_signal_handler(signal.SIGINT, on_signal if not parent else lambda: None)  # its parent forwards it
    if parent:
        loop.add_reader(parent.sentinel, stop.set)
    try:
        async with serve_episodes(EPISODE, **settings) as running:
            hosts, (_, port, *_) = [sock.getsockname()[0] for sock in running.sockets], running.sockets[0].getsockname()
            url = f"ws://{f'[{hosts[0]}]' if ':' in hosts[0] else hosts[0]}:{port}/ws"
            log.info("listening on %s (try: python -m websockets %s)", url, url)
            if not settings["token"] and any(host != "::1" and not host.startswith("127.") for host in hosts):
                log.warning("anybody who reaches this address can use the server: set SERVER_TOKEN to ask for a token")
            await stop.wait()
            if parent:
                loop.remove_reader(parent.sentinel)
    except asyncio.CancelledError:  # a second signal: now, even if a thread is still at work
        os._exit(0)
    stuck = threading.Timer(1, os._exit, (0,))  # a thread of a blocked step, for which Python would wait
    stuck.daemon = True
    stuck.start()


def work(settings: dict[str, Any], level: str) -> None:
    """Runs one server process. Raises OSError if it cannot listen."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=level.upper())
    logging.getLogger("websockets").setLevel(logging.WARNING)  # at DEBUG it would write the token of each handshake
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # macOS names no hard limit, but has one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= limit < settings["max_sessions"] + 32:
        log.warning("--max-sessions %d does not fit under the limit of %d open files", settings["max_sessions"], limit)
    with asyncio.Runner() as runner:
        task = runner.get_loop().create_task(run(settings))
        while not task.done():
            try:
                runner.get_loop().run_until_complete(task)
            except BaseException:  # SystemExit in a task that an environment made stops the loop, but nothing else
                if task.done():
                    raise
                log.exception("an environment stopped the event loop, which goes on")


def supervise(count: int, settings: dict[str, Any], level: str) -> None:
    """Runs processes that share the port; starts another when one dies, and ends them at a signal as `run` does."""
    for family, *_, address in socket.getaddrinfo(settings["host"] or None, settings["port"], type=socket.SOCK_STREAM):
        socket.create_server(address[:2], family=family).close()  # raises OSError if the port is in use
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    workers: list[Any] = []
    try:
        while True:
            started = time.monotonic()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a worker inherits it: Ctrl-C reaches it through here
            while len(workers) < count:
                workers.append(multiprocessing.get_context("spawn").Process(target=work, args=(settings, level)))
                workers[-1].start()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            multiprocessing.connection.wait([worker.sentinel for worker in workers])
            workers = [worker for worker in workers if worker.is_alive()]
            log.error("%d of %d workers died: starting others", count - len(workers), count)
            time.sleep(max(0, started + 1 - time.monotonic()))  # no more often than once a second
    except KeyboardInterrupt:
        workers = [worker for worker in workers if worker.is_alive()]
        with contextlib.suppress(KeyboardInterrupt):
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.join()
        for number in signal.SIGINT, signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
        for worker in workers:
            worker.terminate()  # by a second signal


def main() -> None:
    """The command line."""
    text = "Serves this file's environment on ws://HOST:PORT/ws; with the variable SERVER_TOKEN set, to who sends it."
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=text)  # without usage, an error is one line
    env, add = os.environ.get, parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=int, default=env("PORT", "8000"), help="0 takes a free one (variable PORT, else 8000)")
    add("--max-sessions", type=int, default=env("MAX_CONCURRENT_ENVS", "1000"), help="(MAX_CONCURRENT_ENVS, else 1000)")
    add("--idle-timeout", type=float, default=3600, help="seconds until a silent client is closed, 0: never (3600)")
    add("--drain-timeout", type=float, default=30, help="seconds for running episodes after SIGTERM or Ctrl-C (30)")
    add("--allow-origin", dest="allow_origins", action="append", default=[], help="of browser pages; repeatable")
    add("--workers", type=int, default=1, help="processes on the port, each with its own --max-sessions (1)")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    settings = vars(parser.parse_args())
    for name, low in {"port": 0, "max_sessions": 1, "idle_timeout": 0, "drain_timeout": 0, "workers": 1}.items():
        high = 2**16 - 1 if name == "port" else 10**9
        if not low <= settings[name] <= high:
            parser.error(f"--{name.replace('_', '-')} must be from {low} to {high}, not {settings[name]}")
    settings["token"] = token = env("SERVER_TOKEN")
    if token is not None and not re.fullmatch("[!-~]+", token):
        parser.error("the variable SERVER_TOKEN must be printable ASCII without spaces, or not be set")
    workers, level = settings.pop("workers"), settings.pop("log_level")
    if workers > 1 and (settings["port"] == 0 or not hasattr(socket, "SO_REUSEPORT")):
        parser.error("--workers above 1 needs a --port other than 0, and a platform with SO_REUSEPORT")
    try:
        if workers > 1:
            supervise(workers, settings | {"reuse_port": True}, level)
        else:
            work(settings, level)
    except (OSError, UnicodeError) as exc:
        parser.exit(1, f"server.py: cannot listen on {settings['host']} port {settings['port']}: {exc}\n")


if __name__ == "__main__":
    main()
