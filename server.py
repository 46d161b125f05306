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
import os
import re
import resource
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from math import inf
from multiprocessing import get_context, parent_process, resource_tracker
from time import monotonic, sleep
from traceback import format_exception_only
from typing import Any

try:
    from websockets import ConnectionClosed, Request, Response, Server, ServerConnection, State, broadcast, serve
    from websockets import TooManyFragments as _  # noqa: F401  version 16 does not have it
except ImportError:
    raise SystemExit("Python >= 3.11 is needed, and pip install 'websockets>=17,<18'; make has both in .venv") from None

__version__ = "1.1.0"
Environment = dict[str, Callable[..., Any]]
log = logging.getLogger("server")

# ---- The environment: what an author replaces ------------------------------------------------------------------------
METADATA = {"name": "null", "description": "Any action ends the episode with reward 0.5.", "version": "1.0.0"}
TASKS = {"null": "Send any action: it ends the episode with reward 0.5."}  # task_id: prompt
SCHEMA = {"action": {"type": "object"}, "observation": {"type": "object"}, "state": {"type": "object"}}  # JSON Schemas


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

    return {"reset": reset, "step": step, "state": lambda: {"task_id": task_id}}


EPISODE = null_episode  # what `python server.py` serves

# ---- The messages: JSON objects, strict in both directions -----------------------------------------------------------
KEYS = {"reset": {"type", "data"}, "step": {"type", "data"}, "state": {"type"}, "close": {"type"}}
decode = json.JSONDecoder(parse_constant=int).decode  # int() refuses NaN and Infinity (RFC 8259, section 6)
encode = json.JSONEncoder(
    allow_nan=False, separators=(",", ":"), default=lambda it: it.tolist() if hasattr(it, "tolist") else json.dumps(it)
).encode


def observation(fields: dict[str, Any], reward: Any = None, done: bool = False, metadata: Any = None) -> dict[str, Any]:
    """What `reset` and `step` return: `fields` and `metadata` are dicts, `reward` is a number, a bool or None.

    What has `tolist()`, as NumPy's arrays and scalars and all tensors do, may stand for a list or a number anywhere.
    """
    reward = reward.tolist() if hasattr(reward, "tolist") else reward
    result = {"observation": fields, "reward": reward, "done": bool(done)}
    return result | {"metadata": dict(metadata)} if metadata else result


class Refused(Exception):
    """Answers a request with an error: `raise Refused(what is wrong, *path to the wrong value, code="...")`."""

    def __init__(self, what: object, *loc: object, code: str = "VALIDATION_ERROR", **further: Any) -> None:
        text = "".join(format_exception_only(what)).strip() if isinstance(what, BaseException) else str(what)
        errors = {"errors": [{"loc": [*map(str, loc)], "msg": text}]} if code == "VALIDATION_ERROR" else {}
        self.reply = encode({"type": "error", "data": {"message": text, "code": code, **errors, **further}})


Invalid = Refused  # for environments: `raise Invalid("what would be right", "data", "key")`


def read(message: str | bytes) -> tuple[str, dict[str, Any]]:
    """The type and the data of a request. Raises Refused."""
    try:
        request = decode(message if isinstance(message, str) else message.decode())
    except (ValueError, RecursionError) as exc:
        raise Refused(f'not JSON: {exc}. Send one object such as {{"type": "reset"}}', code="INVALID_JSON") from None
    if not isinstance(request, dict):
        raise Refused(f'a message must be an object such as {{"type": "reset"}}, not a {type(request).__name__}')
    kind = request.get("type")
    if not isinstance(kind, str) or kind not in KEYS:
        seen = repr(kind)[:80] if isinstance(kind, str) else "no string"
        raise Refused(f"type must be one of {', '.join(KEYS)}; it is {seen}", code="UNKNOWN_TYPE")
    if stray := request.keys() - KEYS[kind]:
        raise Refused(f"unknown key {min(stray)!r:.80}: {kind} has only {' and '.join(KEYS[kind])}", min(stray))
    data = request.get("data", None if kind == "step" else {})
    if not isinstance(data, dict):
        raise Refused(f"{kind} needs data that is an object", "data")
    if kind == "reset":
        if not isinstance(data.get("task_id"), str | None):
            raise Refused("task_id must be a string or null", "data", "task_id")
        if (seed := data.get("seed")) is not None and not (type(seed) is int and seed >= 0):
            raise Refused("seed must be an integer >= 0 or null", "data", "seed")
        if (name := data.get("episode_id")) is not None and not (isinstance(name, str) and len(name) <= 255):
            raise Refused("episode_id must be a string of at most 255 characters or null", "data", "episode_id")
    return kind, data


# ---- The session: one socket, its environment, and the books of its episodes -----------------------------------------
RESTART = "the server is restarting"  # the reason beside close code 1001
LARGE = 2**16  # bytes
NUMBER = int, float, type(None)
# The kernel tells which hosts are gone, by what they do not acknowledge or, where it cannot, by keepalive probes.
TCP = {"TCP_USER_TIMEOUT": 100_000, "TCP_KEEPIDLE": 60, "TCP_KEEPALIVE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
Sessions = dict[asyncio.Task[None], Callable[[], tuple[ServerConnection, bool, float]]]


class Connection(ServerConnection):
    """The library's connection, made safe against requests with a body, and clients that read nothing or never end."""

    head = b""

    def data_received(self, data: bytes) -> None:
        if not self.response:  # a body, and the header that announces it, would make the library hang up
            head, end, _ = (self.head + data).partition(b"\r\n\r\n")
            if self.request or not (end or len(head) > LARGE):
                self.head = head
                return
            data = re.sub(rb"(?i)\r\n(content-length|transfer-encoding):[^\r\n]*", b"", head) + end
            self.head = b""
        super().data_received(data)

    def pause_writing(self) -> None:  # answers to what it sends, such as pings, would pile up
        super().pause_writing()
        self.transport.pause_reading()
        self.recv_messages.resume = lambda: None

    def resume_writing(self) -> None:
        super().resume_writing()
        self.recv_messages.resume = self.transport.resume_reading
        if not self.recv_messages.paused:
            self.transport.resume_reading()

    async def close(self, code: int = 1000, reason: str = "") -> None:  # the library's waits for a client to read
        timer = self.loop.call_later(self.close_timeout or 5, self.transport.abort)
        await super().close(code, reason)
        timer.cancel()


async def session(ws: ServerConnection, environment: Environment, sessions: Sessions) -> None:
    """Answers one request after the other until the socket ends, however it ends; then runs the environment's `close`.

    While it lasts, `sessions` maps its task to a function that returns the socket, whether an episode is running, and
    since when the session has been waiting for its client; infinite while it is not.
    """
    task, lost, serving = asyncio.current_task(), ws.connection_lost_waiter, ws.server.is_serving
    assert task
    kind, episode_id, step_count, waiting_since = "", None, 0, monotonic()
    done: bool | None = None  # None before the first episode

    async def call(handler: str, *args: Any) -> Any:
        result = environment[handler](*args)
        return await result if hasattr(result, "__await__") else result

    sessions[task] = lambda: (ws, done is False, waiting_since)
    lost.add_done_callback(lambda _: task.cancel() if waiting_since == inf else None)
    try:
        while ws.state is State.OPEN and (done is False or serving()):  # a server that drains serves no more
            message, waiting_since = await ws.recv(), inf
            try:
                kind, data = read(message)
                if kind == "close" or (kind == "reset" and not serving()):
                    break
                if kind == "step" and done is not False:
                    raise Refused("no episode is running: send reset first", code="EXECUTION_ERROR")
                if kind == "state":
                    if episode_id is None and done is not None:
                        episode_id = str(uuid.uuid4())
                    books = {"episode_id": episode_id, "step_count": step_count, "done": bool(done)}
                    reply = encode({"type": "state", "data": books | await call("state") | books})
                else:
                    given, result = data.get("episode_id"), await call(kind, data)
                    get = result.get if isinstance(result, dict) else {}.get
                    fields, reward, over = get("observation"), get("reward", ""), get("done")
                    if not (isinstance(fields, dict) and isinstance(reward, NUMBER) and isinstance(over, bool)):
                        raise TypeError(f"{kind} must return observation(dict, number, bool), not {result!r:.200}")
                    reply = encode({"type": "observation", "data": result})
                    if kind == "reset":  # nothing can fail any more: now the books change
                        episode_id, step_count = given, -1
                    step_count, done = step_count + 1, over
            except Refused as exc:
                reply = exc.reply
            except BaseException as exc:  # model-written code raises anything, such as SystemExit by exit()
                if isinstance(exc, asyncio.CancelledError) and lost.done():
                    raise
                while task.uncancel():  # a TaskGroup of Python 3.11 leaves its cancellation behind
                    pass
                log.exception("the environment failed")
                reply = Refused(exc, code="EXECUTION_ERROR").reply
            waiting_since = monotonic()
            if len(reply) > LARGE and hasattr(socket, "TCP_USER_TIMEOUT") and not lost.done():
                # While it is paused, a client reads no reply, which closes its TCP window: that is no absence.
                ws.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
            broadcast((ws,), reply)  # as `send` does, but for a context manager that costs as much as reading JSON
            del message, reply  # a session that waits holds neither
            await ws.drain()
    except (ConnectionClosed, OSError, asyncio.CancelledError):  # the client has left, maybe in the middle of a step
        pass
    finally:
        waiting_since = monotonic()  # the end of the socket is not to cut `close` short
        while task.uncancel():
            pass
        try:
            await call("close")
        except asyncio.CancelledError:  # as by `task.cancel(); await task`
            pass
        except BaseException:
            log.exception("the environment's close failed")
        finally:
            del sessions[task]
    if kind != "close" and not lost.done():  # the library's own end, with 1000, is right for these
        await ws.close(1001, RESTART)


# ---- The HTTP pages, on the same port --------------------------------------------------------------------------------
PATHS = ("/", "/health", "/metadata", "/schema", "/openapi.json", "/ws")
ABOUT = f"{METADATA['name']}: {METADATA['description']} Episodes are played on /ws. Paths: {' '.join(PATHS)}\n"
PAGES: dict[str, Any] = {"/": ABOUT, "/metadata": METADATA | {"server_version": __version__}, "/schema": SCHEMA}
GET = {"get": {"responses": {"200": {"description": "OK"}}}}
INFO = {"title": METADATA["name"], "version": "1.0.0"}
PAGES["/openapi.json"] = {"openapi": "3.1.0", "info": INFO, "paths": dict.fromkeys(PATHS, GET)}


def respond(ws: ServerConnection, request: Request, token: str | None, health: dict[str, Any]) -> Response | None:
    """The answer to an HTTP request, or None where `websockets` is to go on with the opening handshake."""
    path, status, page, header = request.path.partition("?")[0], 200, "", ("Content-Type", "text/plain; charset=utf-8")
    scheme, _, given = " ".join(request.headers.get_all("Authorization")).encode("latin-1").partition(b" ")
    allowed = token is None or given and scheme.lower() == b"bearer" and hmac.compare_digest(given, token.encode())
    if not allowed and path != "/health":
        status, page, header = 401, "Send the header Authorization: Bearer TOKEN.\n", ("WWW-Authenticate", "Bearer")
    elif path not in PATHS:
        status, page = 404, f"Nothing here, only {' '.join(PATHS)}; reset and step are messages on /ws.\n"
    elif request.method not in ("GET", "HEAD"):
        status, page, header = 405, "Only GET and HEAD; reset and step are messages on /ws.\n", ("Allow", "GET, HEAD")
    elif path == "/ws" and request.method == "GET":
        return None
    elif path == "/ws":
        status, header = 426, ("Upgrade", "websocket")
    elif path == "/":
        page = PAGES[path]
    else:
        page, header = encode(PAGES.get(path, health)), ("Content-Type", "application/json")
    response = ws.respond(status, page)
    response.headers.pop(header[0], None)
    response.headers[header[0]] = header[1]
    if request.method == "HEAD":
        response.body = b""
    return response


# ---- The server: who gets a session, and when sessions end -----------------------------------------------------------
# A longer message closes its own socket with 1009. A trainer in its optimizer step answers no ping: that ends nothing.
LIMITS: dict[str, Any] = {"max_size": 2**24, "max_queue": (1, 1), "ping_timeout": None, "close_timeout": 5}


@contextlib.asynccontextmanager
async def serve_episodes(
    new_episode: Callable[[], Environment],
    *,
    allow_origins: Iterable[Any] = (),
    max_sessions: int = 1000,
    idle_timeout: float = 3600,
    drain_timeout: float = 0,
    token: str | None = None,
    **options: Any,
) -> AsyncIterator[Server]:
    """Serves environments: `async with serve_episodes(null_episode, host="127.0.0.1", port=0) as running:`.

    `running.sockets` tells the port, other `options` go to `websockets.serve`, times are in seconds. At the end of the
    block it accepts no more, gives running episodes `drain_timeout`, and closes the rest with 1001. Raises OSError if
    it cannot listen.
    """
    sessions: Sessions = {}

    def count() -> dict[str, Any]:
        return {"active_sessions": len(sessions), "max_sessions": max_sessions}

    async def handler(ws: ServerConnection) -> None:
        if len(sessions) >= max_sessions:
            refused = Refused("all sessions are in use: try again later", code="CAPACITY_REACHED", **count())
            broadcast((ws,), refused.reply)
            return await ws.close(1013)
        try:
            environment: Environment = {"state": dict, "close": dict, **new_episode()}
        except BaseException as exc:
            log.exception("the environment could not be made")
            broadcast((ws,), Refused(exc, code="FACTORY_ERROR").reply)
            return await ws.close(1011)
        await session(ws, environment, sessions)

    async def close_where(chosen: Callable[[bool, float], bool], reason: str) -> None:
        status = [status() for status in sessions.values()]
        await asyncio.gather(*(ws.close(1001, reason) for ws, running, since in status if chosen(running, since)))

    async def close_idle() -> None:
        while idle_timeout:
            await asyncio.sleep(min(idle_timeout / 4, 15))
            reason = f"no message for {idle_timeout:g} s"
            await close_where(lambda _, since: monotonic() - since > idle_timeout, reason)

    server = await serve(
        handler,
        process_request=lambda ws, request: respond(ws, request, token, {"status": "healthy", **count()}),
        process_response=lambda ws, request, response: request.headers.clear(),  # 2 kB that nobody reads any more
        create_connection=Connection,
        origins=[None, *allow_origins],
        start_serving=False,
        **LIMITS | {"host": "127.0.0.1", "port": 8000, "compression": None, "backlog": 8} | options,
    )
    for sock in server.sockets:  # what it accepts inherits this
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in TCP.keys() & vars(socket):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), TCP[name])
    await server.start_serving()
    for sock in server.sockets:  # out of descriptors, asyncio logs as many errors a second as its own backlog has
        with sock.dup() as listener:
            listener.listen(1024)
    watcher = asyncio.create_task(close_idle())
    try:
        yield server
    finally:
        log.info("draining: %d sessions, %g s for their episodes", len(sessions), drain_timeout)
        watcher.cancel()
        server.server.close()  # the library's own close, below, takes a turn in which sessions would still begin
        server.close(close_connections=False)
        idle = close_where(lambda running, since: not running and since < inf, RESTART)
        tasks = [asyncio.create_task(idle), *sessions]
        try:
            await asyncio.wait(tasks, timeout=drain_timeout)
            await close_where(lambda running, since: True, RESTART)
            await asyncio.wait(tasks, timeout=5)
        finally:  # also at a second signal, which cancels this
            for ws in server.all_connections:
                ws.transport.abort()
            await asyncio.wait(tasks, timeout=1)
            log.info("drained")


# ---- The command line, signals, workers ------------------------------------------------------------------------------
async def run(settings: dict[str, Any]) -> None:
    """Serves until a signal: the first one drains, a second one ends it now."""
    loop, task, stop = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
    parent = parent_process()  # of a worker

    def on_signal() -> None:
        if stop.is_set() and task:
            loop.call_soon(task.cancel)  # after `stop.wait()`, also when both signals come at once
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, on_signal)
    loop.add_signal_handler(signal.SIGINT, on_signal if not parent else lambda: None)  # its parent hands it on
    if parent:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # `supervise` has blocked some signals
        loop.add_reader(parent.sentinel, stop.set)
    with contextlib.suppress(asyncio.CancelledError):  # by a second signal
        async with serve_episodes(EPISODE, **settings) as running:
            host, port, *_ = running.sockets[0].getsockname()
            url = f"ws://{f'[{host}]' if ':' in host else host}:{port}/ws"
            log.info("listening on %s (try: python -m websockets %s)", url, url)
            if not settings["token"] and any(not re.match(r"127\.|::1$", s.getsockname()[0]) for s in running.sockets):
                log.warning("anybody who reaches this address can use the server: set SERVER_TOKEN to ask for a token")
            await stop.wait()
            if parent:
                loop.remove_reader(parent.sentinel)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.alarm(1)  # for the thread of a blocked step, for which Python would wait


def work(settings: dict[str, Any]) -> None:
    """Runs one server process. Raises OSError if it cannot listen."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=settings.pop("log_level").upper())
    logging.getLogger("websockets").setLevel(logging.WARNING)  # at DEBUG it would write the token of each handshake
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # macOS names no hard limit, but has one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if 0 <= hard < settings["max_sessions"] + 32:
        log.warning("--max-sessions %d does not fit under the limit of %d open files", settings["max_sessions"], hard)
    with asyncio.Runner() as runner:
        task = runner.get_loop().create_task(run(settings))
        while not task.done():
            try:
                runner.get_loop().run_until_complete(asyncio.wait([task]))
            except BaseException:  # SystemExit in a task that an environment made stops the loop, but nothing else
                log.exception("an environment stopped the event loop, which goes on")
        task.result()


def supervise(count: int, settings: dict[str, Any]) -> None:
    """Runs processes that share the port; replaces one that dies, a second later, and hands every signal on to them."""
    resource_tracker.ensure_running()  # now, because it unblocks signals
    signals = signal.SIGINT, signal.SIGTERM, signal.SIGCHLD
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # to wait for them; a worker inherits this until it handles them
    signal.signal(signal.SIGCHLD, lambda *_: None)  # some systems drop it otherwise
    workers: list[Any] = []
    while workers or count:
        while len(workers) < count:
            workers.append(get_context("spawn").Process(target=work, args=(settings,)))
            workers[-1].start()
        if signal.sigwait(signals) != signal.SIGCHLD:
            count = 0
            for worker in workers:
                worker.terminate()
        workers = [worker for worker in workers if worker.is_alive()]
        if len(workers) < count:
            log.error("%d of %d workers died: starting others", count - len(workers), count)
            sleep(1)


def main() -> None:
    """Serves this file's environment on ws://HOST:PORT/ws; with the variable SERVER_TOKEN set, to who sends it."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=main.__doc__)  # so an error is one line
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
    workers, port = settings.pop("workers"), settings["port"]
    if workers > 1 and (port == 0 or not hasattr(socket, "SO_REUSEPORT")):
        parser.error("--workers above 1 needs a --port other than 0, and a platform with SO_REUSEPORT")
    try:
        if workers == 1:
            return work(settings)
        for family, *_, address in socket.getaddrinfo(settings["host"] or None, port, type=socket.SOCK_STREAM):
            socket.create_server(address[:2], family=family).close()  # raises OSError if the port is in use
        supervise(workers, settings | {"reuse_port": True})
    except (OSError, UnicodeError) as exc:
        parser.exit(1, f"server.py: cannot listen on {settings['host']} port {port}: {exc}; see --help\n")


if __name__ == "__main__":
    main()
