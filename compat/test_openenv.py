# SPDX-License-Identifier: 0BSD
"""What is claimed of OpenEnv, run: its clients, its validator, and its server against ../server.py frame by frame.

`make openenv` runs this in `.venv-openenv`, which has OpenEnv; ../server.py runs in `.venv`, which has only websockets.
Variables: COMPARE_SEED and COMPARE_FRAMES for other or more random frames, SERVER_PYTHON for another Python of the server.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
import unittest
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import differences
from openenv.cli._validation import validate_running_environment
from openenv.core.generic_client import GenericEnvClient
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
PYTHON = os.environ.get("SERVER_PYTHON", str(ROOT / ".venv/bin/python"))
OURS = [PYTHON, "-u", str(ROOT / "server.py"), "--port", "0", "--drain-timeout", "0"]
THEIRS = [sys.executable, "-u", str(HERE / "null_openenv.py")]
PROMPT = "Send any action: it ends the episode with reward 0.5."
RESET, STEP, STATE = differences.RESET, differences.STEP, differences.STATE
UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
PATIENCE = 30  # seconds for a reply: a bound for a broken server, and no measure of a right one


@contextlib.contextmanager
def serving(command: list[str], **variables: str) -> Iterator[str]:
    """Runs a server and yields its address, such as 127.0.0.1:40001. A traceback in the log of ours is an error."""
    log: list[str] = []
    listening = threading.Event()

    def read_log() -> None:
        for line in process.stdout or ():
            log.append(line)
            if "listening on ws://" in line:
                listening.set()
        listening.set()

    environment = {name: value for name, value in os.environ.items() if name != "SERVER_TOKEN"}
    with subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment | variables
    ) as process:
        reader = threading.Thread(target=read_log)
        reader.start()
        try:
            listening.wait(60)
            found = re.search(r"listening on ws://([^/]+)/ws", "".join(log))
            if not found:
                raise RuntimeError(f"{command} does not listen:\n{''.join(log)}")
            yield found[1]
        finally:
            process.terminate()
            try:
                process.wait(20)
            finally:
                process.kill()  # does nothing if it has ended
                reader.join()
    if command[: len(OURS)] == OURS and "Traceback" in "".join(log):
        raise AssertionError(f"a traceback in the log of server.py:\n{''.join(log)}")


def setUpModule() -> None:
    """Starts both servers for all tests, and the clients that are blocked for 45 s while the other tests run."""
    global OURS_AT, THEIRS_AT, BLOCKED
    OURS_AT = unittest.enterModuleContext(serving(OURS))
    THEIRS_AT = unittest.enterModuleContext(serving(THEIRS))
    pool = unittest.enterModuleContext(concurrent.futures.ThreadPoolExecutor())
    BLOCKED = pool.submit(lambda: asyncio.run(blocked()))


def opened(address: str, path: str = "/ws", **options: Any) -> Any:
    return connect(f"ws://{address}{path}", proxy=None, compression=None, max_size=None, **options)


async def asked(ws: ClientConnection, frame: differences.Frame) -> str:
    """The reply to a frame; "closed" and the close code if there is none."""
    try:
        with contextlib.suppress(ConnectionClosed):  # an error may have come before the close
            await ws.send(frame, text=True if isinstance(frame, bytearray) else None)
        async with asyncio.timeout(PATIENCE):
            return str(await ws.recv())
    except ConnectionClosed:
        return f"closed {ws.close_code}"
    except TimeoutError:
        return "no reply"


def told(reply: str) -> str:
    """A reply in the words of the table: its type, or its code, or its reward and done."""
    if reply.startswith(("closed", "no reply")):
        return reply
    message = json.loads(reply)
    data = message["data"]
    match message["type"]:
        case "error":
            if not isinstance(data["message"], str) or not data["message"]:
                return f"{data['code']} without a message"
            if data["code"] == "VALIDATION_ERROR" and not all(
                isinstance(item["loc"], list) and isinstance(item["msg"], str) for item in data["errors"]
            ):
                return "VALIDATION_ERROR without errors"
            return str(data["code"])
        case "observation":
            return f"observation, reward {json.dumps(data['reward'])}, done {json.dumps(data['done'])}"
        case kind:
            return str(kind)


class Outcome(NamedTuple):
    """What a frame did to a session: in the words of the table, and what must be equal on both servers, too."""

    words: str
    alive: bool
    fields: dict[str, Any]  # of the observation, but for `metadata`, which is a row of the table
    state: dict[str, Any]  # afterwards; a fresh episode_id counts as any other


async def outcome(ws: ClientConnection, frame: differences.Frame) -> Outcome:
    """Sends the frame, and then `state`."""
    reply = await asked(ws, frame)
    words, fields, after, state = told(reply), {}, reply, {}
    if not reply.startswith("closed"):
        after = await asked(ws, STATE)
        if after.startswith("closed"):
            words += f", then {after}"
        elif told(after) != "state":
            words += f", then `state` gets {told(after)}"
        else:
            state = json.loads(after)["data"]
    if words.startswith("observation"):
        fields = json.loads(reply)["data"]["observation"]
        fields.pop("metadata", None)
    if re.fullmatch(UUID, str(state.get("episode_id"))):
        state["episode_id"] = "UUID"
    return Outcome(words, not after.startswith("closed"), fields, state)


async def play(frames: Iterable[differences.Frame]) -> AsyncIterator[tuple[Any, Any, Outcome, Outcome]]:
    """Sends the frames to a session on each server. Yields each with its row of the table, if any, and its outcomes.

    After a frame that left the sessions unlike, or ended one, the next one goes to new sessions.
    """
    sockets: list[ClientConnection] = []
    playing = False
    for frame in frames:
        sockets = sockets or [await opened(address) for address in (OURS_AT, THEIRS_AT)]
        message = differences.parsed(frame)
        rows = (row for row in differences.TABLE if row.applies and row.applies(frame, message, playing))
        row = next(rows, None)
        ours, theirs = await asyncio.gather(*(outcome(ws, frame) for ws in sockets))
        yield frame, row, ours, theirs
        playing = row is None and ours.state.get("episode_id") is not None and not ours.state["done"]
        if row or not (ours.alive and theirs.alive):
            await asyncio.gather(*(ws.close() for ws in sockets if ws.close_code is None))
            sockets = []
    await asyncio.gather(*(ws.close() for ws in sockets))


def fault(frame: differences.Frame, row: differences.Difference | None, ours: Outcome, theirs: Outcome) -> str | None:
    """What is wrong with a pair of outcomes: unlike without a row, or not as the row says."""
    if row is None and ours == theirs:
        return None
    if row and ours.words != theirs.words and ours.words in row.ours and theirs.words in row.theirs:
        return None
    expected = f"row {row.id!r}: {row.ours}, {row.theirs}" if row else "no difference"
    return f"{frame!r:.300}\n  expected {expected}\n  ours   {ours}\n  theirs {theirs}"


def check_row(test: unittest.TestCase, name: str, ours: str, theirs: str) -> None:
    """Holds a row without `applies` against what was seen."""
    row = next(row for row in differences.TABLE if row.id == name)
    test.assertIsNone(row.applies)
    test.assertEqual([row.ours, row.theirs], [(ours,), (theirs,)])


# ---- Its server, frame by frame --------------------------------------------------------------------------------------


class ItsServer(unittest.TestCase):
    maxDiff = None

    def compare(self, sequences: list[list[differences.Frame]]) -> collections.Counter[str]:
        """Fails for every frame whose outcomes are not as TABLE says; counts the outcomes and the rows."""
        faults: list[str] = []
        counts: collections.Counter[str] = collections.Counter()

        async def run() -> None:
            for frames in sequences:
                async for frame, row, ours, theirs in play(frames):
                    counts[f"row {row.id}" if row else ours.words] += 1
                    if wrong := fault(frame, row, ours, theirs):
                        faults.append(wrong)

        asyncio.run(run())
        if faults:
            self.fail(f"{len(faults)} outcomes are not as listed; the first ones:\n" + "\n".join(faults[:10]))
        return counts

    def test_fixed_frames(self) -> None:
        counts = self.compare(differences.ALIKE)
        self.assertFalse(
            [name for name in counts if name.startswith("row ")], "ALIKE has a frame of a listed difference"
        )

    def test_random_frames(self) -> None:
        seed, count = int(os.environ.get("COMPARE_SEED", "4")), int(os.environ.get("COMPARE_FRAMES", "4000"))
        counts = self.compare([list(differences.random_frames(seed, count))])
        print(f"\n{count} random frames, seed {seed}:", *(f"\n{n:6} {name}" for name, n in counts.most_common()))
        usual = {differences.FIRST, differences.LAST, "state", "closed 1000", "INVALID_JSON", "UNKNOWN_TYPE"}
        self.assertLessEqual(usual, set(counts), "the random frames are poor: nothing got some of these outcomes")

    def test_every_row_is_still_there(self) -> None:
        async def last(frames: list[differences.Frame]) -> tuple[Any, ...]:
            row, ours, theirs = [seen[1:] async for seen in play(frames)][-1]
            return row and row.id, ours.words, theirs.words

        for row in differences.TABLE:
            for frames in row.examples if row.applies else ():
                with self.subTest(row=row.id, frames=repr(frames)[:100]):
                    self.assertEqual(asyncio.run(last(frames)), (row.id, row.ours[0], row.theirs[0]))
                    self.assertNotEqual(row.ours[0], row.theirs[0])

    def test_pipelined(self) -> None:
        frames = [RESET, STATE, STEP, "{", STATE, RESET, '{"type":"x"}', STEP, differences.CLOSE]

        async def pipelined(address: str) -> list[str]:
            async with opened(address) as ws, asyncio.timeout(PATIENCE):
                for frame in frames:
                    await ws.send(frame)
                return [told(str(reply)) async for reply in ws]

        ours, theirs = (asyncio.run(pipelined(address)) for address in (OURS_AT, THEIRS_AT))
        self.assertEqual(ours, theirs)
        self.assertEqual(len(ours), len(frames) - 1)

    def test_row_metadata_twice(self) -> None:
        async def keys(address: str) -> str:
            async with opened(address) as ws:
                return ", ".join(sorted(json.loads(await asked(ws, RESET))["data"]["observation"]))

        check_row(self, "metadata twice", *(asyncio.run(keys(address)) for address in (OURS_AT, THEIRS_AT)))

    def test_row_server_full(self) -> None:
        async def crowd(address: str) -> str:
            async with opened(address) as first:
                self.assertEqual(told(await asked(first, STATE)), "state")
                async with opened(address) as second:
                    reply = await asked(second, STATE)
                    return f"{told(reply)}, then {await asked(second, STATE)}"

        seen = []
        for command in (OURS, THEIRS):
            with serving(command, MAX_CONCURRENT_ENVS="1") as address:
                seen.append(asyncio.run(crowd(address)))
        check_row(self, "server full", *seen)

    def test_row_session_id_in_the_address(self) -> None:
        async def attach(address: str) -> str:
            async with opened(address, "/ws?session_id=x") as ws:
                first = told(await asked(ws, STATE))
                return first if first == "state" else f"{first}, then {await asked(ws, STATE)}"

        seen = [asyncio.run(attach(address)) for address in (OURS_AT, THEIRS_AT)]
        check_row(self, "session_id in the address", *seen)

    def test_row_a_page_in_a_browser(self) -> None:
        async def status(address: str) -> str:
            try:
                async with opened(address, origin="http://example.com") as ws:
                    return str(ws.response.status_code)
            except InvalidStatus as exc:
                return str(exc.response.status_code)

        check_row(self, "a page in a browser", *(asyncio.run(status(address)) for address in (OURS_AT, THEIRS_AT)))

    def test_each_row_in_words_has_its_test(self) -> None:
        for row in differences.TABLE:
            if row.applies is None:
                self.assertIsInstance(row.examples, str)
                name = f"test_row_{row.id.replace(' ', '_')}"
                self.assertTrue(hasattr(self, name) or hasattr(WithoutPongs, name), row.id)


# ---- Its client ------------------------------------------------------------------------------------------------------


class ItsClient(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self) -> None:
        self.url = f"http://{OURS_AT}"
        asyncio.get_running_loop().slow_callback_duration = 10  # unittest's debug mode tells of each above 0.1 s

    def check_first(self, result: Any) -> None:
        self.assertEqual(result.observation, {"task_id": "null", "prompt": PROMPT})
        self.assertIsNone(result.reward)
        self.assertIs(result.done, False)

    def check_last(self, result: Any) -> None:
        self.assertEqual(result.observation, {"task_id": "null"})
        self.assertEqual(result.reward, 0.5)
        self.assertIs(result.done, True)

    async def test_episodes(self) -> None:
        async with GenericEnvClient(self.url) as env:
            none = {"episode_id": None, "step_count": 0, "task_id": None, "done": False}
            self.assertEqual(await env.state(), none)
            for episode_id in ("e-1", "e-2"):
                self.check_first(await env.reset(task_id="null", seed=7, episode_id=episode_id, question="ignored"))
                books = {"episode_id": episode_id, "step_count": 0, "task_id": "null", "done": False}
                self.assertEqual(await env.state(), books)
                self.check_last(await env.step({"answer": "done"}))
                self.assertEqual(await env.state(), books | {"step_count": 1, "done": True})
            self.check_first(await env.reset())
            first = (await env.state())["episode_id"]
            self.check_first(await env.reset())
            self.assertNotIn((await env.state())["episode_id"], (first, "e-2", None))

    async def test_errors(self) -> None:
        async def refused(frames: list[str]) -> str:
            """What the client makes of our last reply to these frames."""
            async with opened(OURS_AT) as ws:
                replies = [json.loads(await asked(ws, frame))["data"] for frame in frames]
            return f"Server error: {replies[-1]['message']} (code: {replies[-1]['code']})"

        async with GenericEnvClient(self.url) as env:
            mistakes = [
                (lambda: env.step({}), [STEP], "EXECUTION_ERROR"),
                (lambda: env.reset(task_id="nope"), ['{"type":"reset","data":{"task_id":"nope"}}'], "VALIDATION_ERROR"),
                (lambda: env.reset(seed=-1), ['{"type":"reset","data":{"seed":-1}}'], "VALIDATION_ERROR"),
            ]
            for call, frames, code in mistakes:
                with self.assertRaises(RuntimeError) as caught:
                    await call()
                self.assertEqual(str(caught.exception), await refused(frames))
                self.assertIn(f"(code: {code})", str(caught.exception))
            await env.reset(episode_id="goes on")
            with self.assertRaises(RuntimeError):
                await env.reset(task_id="nope")
            self.check_last(await env.step({}))
            self.assertEqual((await env.state())["episode_id"], "goes on")
            with self.assertRaises(RuntimeError) as caught:
                await env.step({})
            self.assertEqual(str(caught.exception), await refused([RESET, STEP, STEP]))

    async def test_new_session(self) -> None:
        async with GenericEnvClient(self.url) as parent:
            await parent.reset(episode_id="parent")
            child = await parent.new_session()
            self.assertIsNone((await child.state())["episode_id"])
            await child.reset(episode_id="child")
            self.check_last(await child.step({}))
            state = await parent.state()
            self.assertEqual((state["episode_id"], state["done"]), ("parent", False))

    async def test_64_clients_at_once(self) -> None:
        all_there = asyncio.Barrier(64)

        async def play(number: int) -> dict[str, Any]:
            async with GenericEnvClient(self.url) as env:
                await env.reset(episode_id=f"e-{number}")
                await all_there.wait()
                self.check_last(await env.step({"answer": number}))
                return await env.state()

        states = await asyncio.gather(*map(play, range(64)))
        self.assertEqual([state["episode_id"] for state in states], [f"e-{number}" for number in range(64)])

    def test_sync(self) -> None:
        with GenericEnvClient(self.url).sync() as env:
            for episode_id in ("e-1", "e-2"):
                self.check_first(env.reset(task_id="null", seed=7, episode_id=episode_id))
                self.check_last(env.step({"answer": "done"}))
                self.assertEqual(env.state()["episode_id"], episode_id)
            with self.assertRaisesRegex(
                RuntimeError, r"^Server error: unknown task_id 'nope'.*\(code: VALIDATION_ERROR\)$"
            ):
                env.reset(task_id="nope")
            child = env.new_session()
            self.check_first(child.reset())
            self.check_last(child.step({}))
            self.assertEqual(env.state()["episode_id"], "e-2")

    def test_sync_without_the_wrapper(self) -> None:
        with GenericEnvClient(self.url) as env:
            self.check_first(env.reset())
            self.check_last(env.step({}))

    async def test_a_full_server(self) -> None:
        with serving([*OURS, "--max-sessions", "2"]) as address:
            async with GenericEnvClient(f"http://{address}") as env:
                await env.reset(episode_id="holds")
                other = await env.new_session()
                for _ in range(2):  # a refused client may try again
                    async with GenericEnvClient(f"http://{address}") as late:
                        with self.assertRaisesRegex(RuntimeError, r"^Server error: .*\(code: CAPACITY_REACHED\)$"):
                            await late.reset()
                self.check_last(await env.step({}))
                await other.close()
                async with GenericEnvClient(f"http://{address}") as late:
                    self.check_first(await late.reset())
                self.assertEqual((await env.state())["episode_id"], "holds")

    async def test_a_token(self) -> None:
        with serving(OURS, SERVER_TOKEN="secret-1") as address:
            url = f"http://{address}"
            async with GenericEnvClient(url, headers={"Authorization": "Bearer secret-1"}) as env:
                self.check_first(await env.reset())
                child = await env.new_session()
                self.check_first(await child.reset())
                self.check_last(await env.step({}))
            for headers in (None, {"Authorization": "Bearer secret-2"}):
                with self.assertRaisesRegex(ConnectionError, "401"):
                    await GenericEnvClient(url, headers=headers).connect()


class OlderClients(unittest.TestCase):
    maxDiff = None

    def play(self, folder: str, version: str) -> None:
        python = ROOT / folder / "bin/python"
        self.assertTrue(python.exists(), f"no {folder}: run `make openenv`")
        command = [python, HERE / "older_client.py", f"http://{OURS_AT}"]
        run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        self.assertEqual(run.returncode, 0, run.stderr)
        last = {"observation": {"task_id": "null"}, "reward": 0.5, "done": True}
        expected = [
            [
                {"observation": {"task_id": "null", "prompt": PROMPT}, "reward": None, "done": False},
                "Server error: unknown task_id 'nope'; known: null (code: VALIDATION_ERROR)",
                last,
                {"episode_id": f"e-{number}", "step_count": 1, "task_id": "null", "done": True},
                last,
                {"episode_id": f"e-{number} again", "step_count": 1, "task_id": "null", "done": True},
            ]
            for number in range(17)
        ]
        self.assertEqual(json.loads(run.stdout), [version, *expected])

    def test_the_oldest_with_a_socket(self) -> None:
        self.play(".venv-openenv-old", "0.2.0")

    def test_the_last_of_openenv_core(self) -> None:
        self.play(".venv-openenv-mid", "0.3.0")


# ---- Its validator ---------------------------------------------------------------------------------------------------


class ItsValidator(unittest.TestCase):
    def test_all_but_mcp(self) -> None:
        with mock.patch.dict(os.environ, NO_PROXY="127.0.0.1"):
            ours, theirs = (validate_running_environment(f"http://{address}", 30) for address in (OURS_AT, THEIRS_AT))
        criteria = {criterion["id"]: criterion["passed"] for criterion in ours["criteria"]}
        self.assertEqual({name for name, passed in criteria.items() if not passed}, {"mcp_endpoint"}, ours)
        self.assertEqual(list(criteria), [criterion["id"] for criterion in theirs["criteria"]])
        self.assertTrue(theirs["passed"], "the validator does not pass OpenEnv's own server")
        self.assertGreaterEqual(len(criteria), 6)


# ---- Other clients ---------------------------------------------------------------------------------------------------


class OtherClients(unittest.TestCase):
    def test_node(self) -> None:
        node = shutil.which("node")
        version = subprocess.check_output([node, "--version"], text=True).strip() if node else "none"
        numbers = [int(number) for number in re.findall(r"\d+", version)]
        if numbers < [20, 10]:
            self.skipTest(f"needs Node 20.10 or later for its WebSocket; found: {version}")
        flag = [] if numbers >= [22] else ["--experimental-websocket"]
        command = [node, *flag, HERE / "client.mjs", f"ws://{OURS_AT}/ws"]
        run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        self.assertEqual(run.returncode, 0, run.stderr)
        *replies, close_code = run.stdout.splitlines()
        last = {"observation": {"task_id": "null"}, "reward": 0.5, "done": True}
        state = {"episode_id": "node", "step_count": 1, "task_id": "null", "done": True}
        self.assertEqual(json.loads(replies[0])["data"]["observation"], {"task_id": "null", "prompt": PROMPT})
        self.assertEqual(json.loads(replies[1]), {"type": "observation", "data": last})
        self.assertEqual(json.loads(replies[2]), {"type": "state", "data": state})
        self.assertEqual([len(replies), close_code], [3, "closed 1000"])


# ---- The README ------------------------------------------------------------------------------------------------------


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def masked(line: str) -> str:
    """A line of a transcript without what differs from run to run: the port, and a fresh episode_id."""
    line = re.sub(r"ws://127\.0\.0\.1:\d+", "ws://127.0.0.1:PORT", line)
    return re.sub(UUID, "UUID", line)


class Readme(unittest.TestCase):
    maxDiff = None

    def test_the_transcript_by_hand(self) -> None:
        """Types the lines after `>` into `python -m websockets`, and compares all that it prints."""
        found = re.search(r"^#+ [^\n]*[Bb]y hand[^\n]*\n.*?^```\w*\n(.*?)^```", readme(), re.MULTILINE | re.DOTALL)
        self.assertIsNotNone(found, "README.md has no fenced block after a heading with `by hand`")
        lines = [line for line in found[1].splitlines() if line and not line.startswith("$")]
        self.assertTrue(any(line.startswith("> ") for line in lines), "nothing is sent in it")
        self.assertTrue(any(line.startswith("< ") for line in lines), "nothing is received in it")
        command = [PYTHON, "-m", "websockets", f"ws://{OURS_AT}/ws"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            killer = threading.Timer(60, process.kill)
            killer.start()
            seen = []
            for line in lines:
                if line.startswith("> "):
                    process.stdin.write(line[2:] + "\n")
                    process.stdin.flush()
                seen.append(line if line.startswith("> ") else printed(process))
            process.stdin.close()
            rest = printed(process)
            killer.cancel()
        self.assertEqual([masked(line) for line in seen], [masked(line) for line in lines])
        self.assertEqual(rest, "", "more was printed")

    def test_the_table_of_differences(self) -> None:
        found = re.search(r"<!-- differences -->\n+(.*?)\n+<!-- end of differences -->", readme(), re.DOTALL)
        self.assertIsNotNone(
            found, "README.md has no table between the comments `differences` and `end of differences`"
        )
        self.assertEqual(found[1], differences.markdown(), "python compat/differences.py prints the right one")


def printed(process: subprocess.Popen[str]) -> str:
    """The next line that `python -m websockets` prints, without prompts and cursor movements; "" at the end."""
    while raw := process.stdout.readline():
        line = re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|[78])|\r", "", raw).strip()
        while line.startswith("> ") or line == ">":
            line = line[1:].strip()
        if line:
            return line
    return ""


# ---- Clients that were blocked past their pings ----------------------------------------------------------------------


async def blocked() -> dict[str, Any]:
    """What three clients are told whose event loop slept for 45 s in the middle of an episode.

    The keepalive that both libraries have by default (a ping each 20 s, 20 s for its pong) ends such a session after
    40 s. `client` is OpenEnv's own, and meant to ping each second; `ours` and `theirs` are sockets on the two servers.
    """
    client = GenericEnvClient(f"http://{OURS_AT}", websocket_ping_interval_s=1, websocket_ping_timeout_s=60)
    async with client, opened(OURS_AT, ping_interval=None) as ours, opened(THEIRS_AT, ping_interval=None) as theirs:
        await client.reset(episode_id="long")
        await asyncio.gather(asked(ours, RESET), asked(theirs, RESET))
        time.sleep(45)  # noqa: ASYNC251 - blocks this event loop, as a trainer does
        return {
            "client": (await client.step({"answer": "late"}), await client.state()),
            "ours": await asked(ours, STEP),
            "theirs": await asked(theirs, STEP),
        }


class WithoutPongs(unittest.TestCase):  # the last class by name: the others run while its clients sleep
    def test_its_client_goes_on(self) -> None:
        result, state = BLOCKED.result()["client"]
        self.assertEqual((result.observation, result.reward, result.done), ({"task_id": "null"}, 0.5, True))
        self.assertEqual((state["episode_id"], state["step_count"]), ("long", 1))

    def test_row_missed_pings(self) -> None:
        seen = BLOCKED.result()
        check_row(self, "missed pings", told(seen["ours"]), told(seen["theirs"]))


if __name__ == "__main__":
    unittest.main(verbosity=2)
