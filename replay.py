# SPDX-License-Identifier: 0BSD
"""Plays example episodes against a running environment server, and says of each whether the server kept the rules.

Each task and action gets one episode on a connection of its own; then a group of the first runs at once, as GRPO does.
To make it yours, edit the constants. Exit status: 0 all ok, 1 an episode failed, 2 wrong use or no server, 130 Ctrl-C.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import re
import signal
import sys
import time
import urllib.parse
from collections import Counter, defaultdict
from typing import Any

try:
    from websockets import ConnectionClosed, InvalidHandshake, WebSocketException, connect
except ImportError:
    raise SystemExit("Python >= 3.11 is needed, and pip install 'websockets>=17,<18'; make has both in .venv") from None

TASK_IDS = ["null"]
# An episode each. A list of actions in place of one is an episode of several steps, done only after its last.
ACTIONS: list[Any] = [{"answer": "done"}, {}, {"answer": "42", "tool": "calc", "x": 1}, {"answer": 0}, {"answer": None}]
REWARD: float | None = 0.5  # of the last step; None accepts any number


def show(value: Any) -> str:
    """The value as JSON, without its middle if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"


def why(exc: Exception) -> str:
    """What went wrong with a connection, and what to look at."""
    if isinstance(exc, TimeoutError):
        return "no answer in time: does the server block, or need a longer --timeout?"
    if isinstance(exc, InvalidHandshake):
        return f"{exc}: is it an environment server (path, ws or wss)? HTTP 401 asks for the variable SERVER_TOKEN"
    return f"{str(exc) or type(exc).__name__}: does the server run? see its log (--wait waits for it; wss:// needs TLS)"


def judge(text: str, last: bool, expected: float | None) -> tuple[Any, Any, str]:
    """The reply to `reset` or `step`, its reward, and the first rule that it breaks, with the usual cause, or ''."""
    try:
        reply = json.loads(text)
        json.dumps([[[[reply]]]], allow_nan=False)  # nested as in the log
    except (ValueError, RecursionError) as exc:
        return text, None, f"the reply must be JSON in a text frame ({exc}); it is {show(text)}"
    data = reply["data"] if isinstance(reply, dict) and isinstance(reply.get("data"), dict) else {}
    reward, done = data.get("reward", "missing"), data.get("done")
    near = isinstance(reward, float) and isinstance(expected, float) and math.isclose(reward, expected, rel_tol=1e-7)
    right = isinstance(reward, int | float) if expected is None else near or reward == expected
    rules = [
        (data and reply.get("type") == "observation", 'the reply must be {"type": "observation", "data": {...}}'),
        (isinstance(data.get("observation"), dict), "observation must be an object"),
        (isinstance(reward, int | float | None), "reward must be a number, true, false or null: convert it by float()"),
        (isinstance(done, bool), "done must be true or false: convert it by bool()"),
        (last or not done, "done must be false before the last action (does reset clear it? one action too many?)"),
        (done or not last, "done must be true after the last action (does the step set it? one action missing?)"),
        (right or not last, f"reward must be {'a number' if expected is None else expected} (mend step, or REWARD)"),
    ]
    broken = [f"{rule}; it is {show(reply)}" for kept, rule in rules if not kept]
    return reply, data.get("reward"), broken[0] if broken else ""


async def play(options: argparse.Namespace, task_id: str, entry: Any, times: Any) -> tuple[dict[str, Any], Any]:
    """Plays one episode. Returns its row of the log and its reward, and counts how many milliseconds replies took."""
    steps = entry if isinstance(entry, list) else [entry]
    replies, kind, error, reward, ws = [], "connect", "", None, None
    try:
        ws = await options.dial()
        for number, data in enumerate([{"task_id": task_id}, *steps]):
            kind, begun = "step" if number else "reset", time.perf_counter()
            async with asyncio.timeout(options.timeout):
                with contextlib.suppress(ConnectionClosed):  # what the server said before may still be there to be read
                    await ws.send(json.dumps({"type": kind, "data": data}))
                text = str(await ws.recv())  # a binary frame becomes b'...', which is no JSON
            times[kind][float(f"{(time.perf_counter() - begun) * 1000:.3g}")] += 1  # rounded, so that memory is bounded
            reply, reward, error = judge(text, number == len(steps), options.reward)
            replies.append(reply)
            if error:
                break
        else:
            with contextlib.suppress(ConnectionClosed):
                await ws.send('{"type": "close"}')
                await ws.close()
    except (OSError, WebSocketException, ValueError, ImportError, RecursionError) as exc:  # of connections or values
        error = why(exc)
    finally:
        if ws and not ws.connection_lost_waiter.done():
            ws.transport.abort()
    step = replies[1:] if isinstance(entry, list) else replies[1] if replies[1:] else None
    row = {"task_id": task_id, "action": entry, "reset": replies[0] if replies else None, "step": step, "ok": not error}
    return (row | {"error": f"{kind}: {error}"} if error else row), reward


# ---- All episodes, and the group -------------------------------------------------------------------------------------
def say(line: str, end: str = "\n") -> None:
    """Prints one line. If that is not possible any more (a closed pipe, a full disk), the log is still to be made."""
    with contextlib.suppress(OSError):
        print("".join(char if char.isprintable() else ascii(char)[1:-1] for char in line), end=end, flush=True)


async def replay(options: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    """Plays everything, and adds to the rows of the log. Returns why there is no server, if there is none."""
    for task_id, action in [(task_id, action) for task_id in options.task_ids for action in options.actions]:
        row, _ = await play(options, task_id, action, defaultdict(Counter))
        if not rows and row.get("error", "").startswith("connect"):
            return f"no environment server at {options.url}: {row['error']}"
        rows.append(row)
        outcome = show(row["step"]) if row["ok"] else row["error"]
        say(f"{'OK  ' if row['ok'] else 'FAIL'} {task_id} {show(action)} -> {outcome}")
    task_id, action, singles, good, begun = options.task_ids[0], options.actions[0], len(rows), 0, time.perf_counter()
    times: dict[str, Counter[float]] = defaultdict(Counter)
    try:
        for number in range(1, options.rounds + 1):
            played = await asyncio.gather(*(play(options, task_id, action, times) for _ in range(options.group)))
            errors = [row["error"] for row, _ in played if not row["ok"]]
            good += len(played) - len(errors)
            row = {"task_id": task_id, "concurrent_group_rewards": [reward for _, reward in played], "ok": not errors}
            if number == 1 or rows[-1]["ok"]:  # of all rounds the last, or the first that failed
                rows[singles:] = [row | {"error": f"{len(errors)} failed: {errors[0]}"} if errors else row]
            if options.rounds > 1 and sys.stdout and sys.stdout.isatty():
                say(f"round {number} of {options.rounds}", end="\r")
    finally:  # also after Ctrl-C
        for row in rows[singles:]:
            outcome = show(row["concurrent_group_rewards"]) if row["ok"] else row["error"]
            say(f"{'OK  ' if row['ok'] else 'FAIL'} {task_id} {show(action)} {options.group} at once -> {outcome}")
        for kind, counts in times.items() if options.rounds > 1 else ():
            ms = sorted(counts.elements())
            p50, p99 = ms[len(ms) // 2], ms[len(ms) * 99 // 100]
            say(f"{kind}: p50 {p50}, p99 {p99}, max {ms[-1]} ms; {good / (time.perf_counter() - begun):.1f} episodes/s")
    return ""


# ---- The command line and the log ------------------------------------------------------------------------------------
def examples(path: str | None) -> tuple[Any, Any, Any]:
    """The task ids, actions and reward, of a JSON file if one is given. Raises ValueError that says what is right."""
    given: Any = {"task_ids": TASK_IDS, "actions": ACTIONS, "reward": REWARD}
    if path is not None:
        with open(path, encoding="utf-8-sig") as file:
            given = json.load(file)
    json.dumps([[[[given]]]], allow_nan=False)
    match given:
        case {"task_ids": [_, *_] as ids, "actions": [_, *_] as actions, "reward": int() | float() | None as reward}:
            steps = [step for entry in actions for step in (isinstance(entry, list) and entry or [entry])]
            if len(given) == 3 and {type(step) for step in steps} == {dict} and {type(name) for name in ids} == {str}:
                return ids, actions, reward
    form = '{"task_ids": ["id", ...], "actions": [{...} or [{...}, ...], ...], "reward": number or null}'
    raise ValueError(f"it must be {form}; it is {show(given)}")


def main() -> None:
    """Reads the command line, opens LOG before the first episode, plays, and writes LOG whole or not at all."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("url", metavar="URL", nargs="?", default="127.0.0.1:8000", help="the server (ws://127.0.0.1:8000/ws)")
    add("log", metavar="LOG", nargs="?", default="replay.json", help="file for the replies (replay.json)")
    add("--episodes", metavar="FILE", help="JSON file with task_ids, actions and reward in place of the constants")
    add("--group", type=int, default=5, help="rollouts at once (5)")
    add("--rounds", type=int, default=1, help="how often the group is played (1)")
    add("--timeout", type=float, default=10, help="seconds for each reply (10)")
    add("--wait", type=float, default=0, help="seconds to wait for a server that is starting (0)")
    options = parser.parse_args()
    for name, low in (("group", 1), ("rounds", 1), ("timeout", 0.001), ("wait", 0)):
        if not low <= getattr(options, name) <= 1e9:
            parser.error(f"--{name} must be from {low} to 1e9")
    getattr(sys.stdout, "reconfigure", dict)(errors="backslashreplace")  # for letters that it does not have
    token, limit = os.environ.get("SERVER_TOKEN"), options.timeout
    if token is not None and not re.fullmatch("[!-~]+", token):
        parser.error("the variable SERVER_TOKEN must be printable ASCII without spaces, or not set at all")
    settings: Any = {"additional_headers": token and {"Authorization": f"Bearer {token}"}, "ping_interval": None}
    wrong = f"URL {options.url}"
    try:
        url = urllib.parse.urlsplit(re.sub("(?i)^http", "ws", re.sub("^(?!.*://)", "ws://", options.url)))
        options.url = url._replace(path=url.path.rstrip("/").removesuffix("/ws") + "/ws").geturl()
        settings["proxy"] = None if re.fullmatch(r"localhost|127\.[\d.]+|0\.0\.0\.0|::1?", url.hostname or "") else True
        options.dial = lambda: connect(options.url, open_timeout=limit, close_timeout=limit, max_size=2**26, **settings)
        options.dial()
        wrong = f"--episodes {options.episodes}" if options.episodes else "the constants of replay.py"
        options.task_ids, options.actions, options.reward = examples(options.episodes)
    except (OSError, WebSocketException, ValueError, RecursionError) as exc:
        parser.error(f"{wrong}: {exc}")
    special = os.path.exists(options.log or ".") and not os.path.isfile(options.log)  # such as /dev/null
    part = f"{os.path.realpath(options.log)}.{os.getpid()}.tmp"
    status, problem, deadline, rows = 130, "", time.monotonic() + options.wait, list[dict[str, Any]]()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends as by Ctrl-C
    try:
        with open(options.log if special else part, "w", encoding="utf-8") as file:
            with contextlib.suppress(KeyboardInterrupt):
                while (problem := asyncio.run(replay(options, rows))) and time.monotonic() < deadline:
                    time.sleep(0.1)
                status = 0 if rows and all(row["ok"] for row in rows) else 1
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            head, lines = f'{{"url": {json.dumps(options.url)}, "at_utc": "{at}"', ",\n".join(map(json.dumps, rows))
            file.write(f'{head}, "episodes": [\n{lines}\n], "all_ok": {json.dumps(status == 0)}}}\n')
        if not special:
            os.replace(part, os.path.realpath(options.log))
    except OSError as exc:
        parser.error(f"LOG {options.log}: {exc}")
    except KeyboardInterrupt:  # while a pipe that is LOG waits for its reader
        sys.exit(130)
    finally:
        with contextlib.suppress(OSError):  # it was never made, or is LOG by now
            os.unlink(part)
    if problem and status != 130:
        parser.error(problem)
    say(f"{sum(row['ok'] for row in rows)} of {len(rows)} ok{', interrupted' * (status == 130)}: see {options.log}")
    sys.exit(status)


if __name__ == "__main__":
    main()
