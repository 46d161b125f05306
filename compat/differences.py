# SPDX-License-Identifier: 0BSD
"""The frames that are sent to both servers, and the table of the differences that are meant.

test_openenv.py sends them and fails for a difference that is not in TABLE, and for one in TABLE that is gone.
`python differences.py` prints the table for the README.
"""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# a text message, a binary message, a text message in fragments, a text message of these bytes
Frame = str | bytes | list[str] | bytearray

RESET, STEP, STATE, CLOSE = '{"type":"reset"}', '{"type":"step","data":{}}', '{"type":"state"}', '{"type":"close"}'
DEEP = "[" * 300 + "]" * 300  # more than the 255 levels that pydantic writes
TOO_DEEP = "[" * 100_000 + "]" * 100_000  # more than Python's parser reads
TOO_LONG = "1" * 5000  # more digits than Python's int() reads

# ---- What both servers answer alike: every kind of request and mistake -----------------------------------------------


def reset_with(data: str) -> str:
    return f'{{"type":"reset","data":{data}}}'


def step_with(data: str) -> str:
    return f'{{"type":"step","data":{data}}}'


ALIKE: list[list[Frame]] = [  # each list goes over one socket, with a `state` after each frame
    [STATE, RESET, STATE, STEP, STATE, RESET, STEP, CLOSE],
    [RESET, RESET, STEP, RESET, STEP],
    [CLOSE],
    [reset_with("{}"), reset_with('{"task_id":null,"seed":null,"episode_id":null}'), CLOSE],
    [reset_with('{"task_id":"null","seed":7,"episode_id":"e-1"}'), STEP, reset_with('{"episode_id":"e-2"}'), STEP],
    [reset_with('{"seed":0}'), reset_with(f'{{"seed":{10**100}}}'), reset_with(f'{{"seed":{10**4000}}}')],
    [
        reset_with('{"episode_id":""}'),
        reset_with('{"episode_id":"\\u0000"}'),
        reset_with('{"episode_id":"\u00e9\u4e16"}'),
    ],
    [reset_with(f'{{"episode_id":"{"e" * 255}"}}'), reset_with(f'{{"episode_id":"{"世" * 255}"}}')],
    [reset_with(f'{{"episode_id":{value}}}') for value in ("5", "1.5", "true", "[]", "{}", '["e"]')],
    [
        reset_with(
            '{"prompt":"from a data set","answer":[1,{"x":null}],"":0,"kwargs":1,"args":2,"type":"step","data":3}'
        )
    ],
    [reset_with('{"question":"\\ud800","\\ud800":1}'), reset_with(f'{{"x":{DEEP}}}'), reset_with('{"x":1e400}')],
    [reset_with(value) for value in ("null", "5", "1.5", "true", "false", "[]", '"x"', "[{}]")],
    [RESET, *(step_with(value) for value in ("null", "5", "1.5", "true", "false", "[]", '"x"', "[{}]")), STEP],
    [RESET, '{"type":"step"}', STEP],
    [RESET, step_with('{"answer":"done"}')],
    [RESET, step_with('{"answer":0}')],
    [RESET, step_with('{"answer":null,"tool":"calc","x":[1,2.5,{"y":true}]}')],
    [RESET, step_with('{"metadata":{}}')],
    [RESET, step_with('{"metadata":{"a":1,"\\ud800":2}}')],
    [RESET, step_with('{"type":"list_tools"}')],
    [RESET, step_with('{"self":1,"action":2,"model_config":3,"__class__":4,"__dict__":5,"":6}')],
    [RESET, step_with('{"a":"\\ud800","b":{"\\ud800":1}}')],
    [RESET, step_with(f'{{"a":{DEEP}}}')],
    [RESET, step_with(f'{{"a":{10**4000},"b":1e400,"c":-0.0,"d":1E-999}}')],
    [RESET, step_with('{"a":"' + "a" * 2**20 + '"}')],
    [RESET, step_with('{"a":"' + "a" * (2**24 - 31) + '"}')],  # 16 MiB
    [RESET, step_with('{"a":"' + "a" * (2**24 - 30) + '"}')],  # one byte more
    [RESET, '{"type":"reset","extra":1}', '{"type":"step","data":{},"extra":1}', '{"type":"step","extra":1}', STEP],
    [RESET, '{"type":"reset","data":5,"extra":1}', '{"type":"reset","":null}', '{"type":"reset","Data":{}}', STEP],
    [RESET, '{"type":"state","data":{}}', '{"type":"state","data":null}', '{"type":"state","extra":1}', STEP],
    [RESET, '{"type":"close","data":{}}', '{"type":"close","data":null}', '{"type":"close","code":1000}', STEP, CLOSE],
    [RESET, "{}", '{"data":{}}', '{"action":{}}', '{"type":null}', '{"type":5}', '{"type":true}', STEP],
    [RESET, '{"type":[]}', '{"type":{}}', '{"type":["reset"]}', '{"type":["\\ud800"]}', f'{{"type":{DEEP}}}', STEP],
    [
        RESET,
        '{"type":""}',
        '{"type":"RESET"}',
        '{"type":"reset "}',
        '{"type":"observation"}',
        '{"type":"r\u00e9set"}',
        STEP,
    ],
    ['{"type":"state","type":"reset"}', '{"type":"reset","type":"nothing"}', '{"type":"reset","data":5,"data":{}}'],
    [reset_with('{"episode_id":5,"episode_id":"e-3"}'), STEP],
    [RESET, "", " ", "\n", "{", "}", "[", '"', "nul", "undefined", "NaNa", "-", "01", "1.", ".5", "+1", "0x1", STEP],
    [RESET, "{'type':'reset'}", '{type:"reset"}', '{"type":"reset",}', '{"type" "reset"}', '{"type":"reset"', STEP],
    [RESET, RESET + RESET, RESET + " " + RESET, RESET + "x", RESET + "\0", "\ufeff" + RESET, "\u00a0" + RESET, STEP],
    [
        RESET,
        '{"type":"re\tset"}',
        '{"type":"re\0set"}',
        '{"type":"\\x"}',
        '{"type":"\\u12"}',
        step_with('{"a":01}'),
        STEP,
    ],
    [f" \t\r\n{RESET}\n", '{ "type" : "reset" , "data" : { } }', '{"\\u0074ype":"\\u0072eset"}', STEP],
    [RESET, bytearray(b'{"type":"\xff"}')],
    [['{"type":', '"reset"}'], [*STEP], [""], ["", RESET, ""]],
]


# ---- The differences that are meant ----------------------------------------------------------------------------------


class Difference(NamedTuple):
    """One row. The last frame of each example gets the first of the outcomes; the frames before it lead there.

    `applies(frame, message, playing)` tells of any frame whether it belongs to this row, if to none before: `message`
    is what `parsed` makes of it, `playing` whether an episode runs. Such a frame gets one of the outcomes, and not the
    same one on both sides. Rows without `applies` are seen by the test of the same name.
    """

    id: str
    examples: list[list[Frame]] | str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    reason: str
    applies: Callable[[Frame, Any, bool], bool] | None = None


DROPPED = "SESSION_ERROR, then closed 1000"
FIRST, LAST = "observation, reward null, done false", "observation, reward 0.5, done true"
SPOILED = FIRST + ", then `state` gets EXECUTION_ERROR"
ERRORS = "INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR", "EXECUTION_ERROR"
ANY = FIRST, LAST, "state", "closed 1000", *ERRORS, DROPPED  # where it depends on the rest of the frame
KEYS = {
    "reset": {"type", "data"},
    "step": {"type", "data"},
    "state": {"type"},
    "close": {"type"},
    "mcp": {"type", "data"},
}


def parsed(frame: Frame) -> Any:
    """What Python's parser makes of a text frame; the exception that it raises where it does."""
    try:
        return json.loads("".join(frame) if isinstance(frame, list) else frame)
    except (ValueError, RecursionError) as exc:
        return exc


def is_strict(frame: Frame) -> bool:
    """Whether a frame that Python's parser reads is free of NaN and Infinity."""
    found: list[str] = []
    json.loads("".join(frame) if isinstance(frame, list) else frame, parse_constant=found.append)
    return not found


def kind_of(message: Any) -> str | None:
    """The type of a message that OpenEnv knows."""
    kind = message.get("type") if isinstance(message, dict) else None
    return kind if isinstance(kind, str) and kind in KEYS else None


def is_whole(message: Any, kind: str) -> bool:
    """Whether it is a message of this type with no stray key and with data that is an object."""
    return kind_of(message) == kind and message.keys() <= KEYS[kind] and isinstance(message.get("data", {}), dict)


def cannot_be_sent(value: Any) -> bool:
    """Whether pydantic cannot write the value as JSON: it holds a lone surrogate, or is too deep."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return isinstance(value, (dict, list)) and levels(value) > 250


def levels(value: Any) -> int:
    """How deep lists and objects are nested in the value."""
    depth, layer = 0, [value]
    while layer:
        lists = [item if isinstance(item, list) else item.values() for item in layer if isinstance(item, (dict, list))]
        depth, layer = depth + 1, [item for items in lists for item in items]
    return depth


def refused_parts(message: Any) -> list[Any]:
    """The parts of a refused message that OpenEnv's VALIDATION_ERROR repeats."""
    kind = kind_of(message)
    if kind is None:
        return []
    parts: list[Any] = [[key, value] for key, value in message.items() if key not in KEYS[kind]]
    data = message.get("data")
    if "data" in message and "data" in KEYS[kind] and not isinstance(data, dict):
        parts.append(data)
    if is_whole(message, "reset") and isinstance(data, dict) and not isinstance(data.get("episode_id"), str | None):
        parts.append(data["episode_id"])
    return parts


def action_of(message: Any) -> dict[str, Any]:
    """The action of a step that OpenEnv does not refuse before it looks at the action; else an empty one."""
    return message.get("data", {}) if is_whole(message, "step") else {}


def refused_in_action(message: Any) -> list[Any]:
    """The parts of an action that OpenEnv refuses, and its VALIDATION_ERROR repeats."""
    action = action_of(message)
    if isinstance(action.get("type"), (list, dict)):
        return []
    metadata = [action["metadata"]] if not isinstance(action.get("metadata", {}), dict) else []
    return metadata + [key for key in action if cannot_be_sent(key)]


def reset_data(message: Any) -> dict[str, Any]:
    """The data of a reset that OpenEnv does not refuse before its environment sees it."""
    return message.get("data", {}) if is_whole(message, "reset") else {}


def is_bad_seed(value: Any) -> bool:
    return value is not None and not (type(value) is int and value >= 0)


TABLE = [
    Difference(
        "binary",
        [[RESET.encode()]],
        (FIRST, *ANY),
        (DROPPED,),
        "Some clients send bytes. They are read as the same text would be.",
        lambda frame, message, playing: isinstance(frame, bytes),
    ),
    Difference(
        "too deep, too long",
        [[TOO_DEEP], [step_with(f'{{"a":{TOO_DEEP}}}')], [TOO_LONG], [step_with(f'{{"a":{TOO_LONG}}}')]],
        ("INVALID_JSON",),
        (DROPPED,),
        "A bad message is the client's to mend; its episode goes on. OpenEnv's parser raises what it does not expect.",
        lambda frame, message, playing: (
            isinstance(message, Exception) and not isinstance(message, json.JSONDecodeError | UnicodeDecodeError)
        ),
    ),
    Difference(
        "NaN",
        [[RESET, step_with('{"a":NaN}')], [RESET, step_with('{"a":[-Infinity]}')]],
        ("INVALID_JSON",),
        (LAST, "mcp", SPOILED, *ANY),
        "It is not JSON (RFC 8259), and parsers in other languages refuse it.",
        lambda frame, message, playing: not isinstance(message, Exception) and not is_strict(frame),
    ),
    Difference(
        "no object",
        [["[]"], [f"[{RESET}]"], ["1"], ['"reset"'], ["null"], ["true"], [DEEP]],
        ("VALIDATION_ERROR",),
        (DROPPED,),
        "A bad message is the client's to mend; its episode goes on.",
        lambda frame, message, playing: not isinstance(message, (dict, Exception)),
    ),
    Difference(
        "mcp",
        [['{"type":"mcp","data":{"jsonrpc":"2.0","method":"tools/list","id":1}}']],
        ("UNKNOWN_TYPE",),
        ("mcp", "VALIDATION_ERROR", "EXECUTION_ERROR", DROPPED),
        "There is no MCP here.",
        lambda frame, message, playing: kind_of(message) == "mcp",
    ),
    Difference(
        "surrogate in type",
        [['{"type":"\\ud800"}']],
        ("UNKNOWN_TYPE",),
        ("EXECUTION_ERROR",),
        "It is an unknown type as any other. OpenEnv fails to write its reply.",
        lambda frame, message, playing: (
            isinstance(message, dict) and isinstance(message.get("type"), str) and cannot_be_sent(message["type"])
        ),
    ),
    Difference(
        "names of OpenEnv's own",
        [[reset_with('{"session_id":"s"}')], [reset_with('{"func":"f"}')], [reset_with('{"self":1}')]],
        (FIRST, "VALIDATION_ERROR"),
        ("EXECUTION_ERROR",),
        "Trainers pass whole rows of a data set, with any column names. OpenEnv passes them on as Python keyword "
        "arguments, where these three collide with its own.",
        lambda frame, message, playing: not {"self", "func", "session_id"}.isdisjoint(reset_data(message)),
    ),
    Difference(
        "unknown task",
        [[reset_with('{"task_id":"nope"}')], [reset_with('{"task_id":5}')], [reset_with('{"task_id":[]}')]],
        ("VALIDATION_ERROR",),
        ("EXECUTION_ERROR",),
        "The request is wrong, not the environment. In OpenEnv every exception of an environment has this code.",
        lambda frame, message, playing: reset_data(message).get("task_id") not in (None, "null"),
    ),
    Difference(
        "refused and not repeatable",
        [
            ['{"type":"reset","extra":"\\ud800"}'],
            ['{"type":"state","\\ud800":1}'],
            ['{"type":"step","data":"\\ud800"}'],
            [f'{{"type":"reset","data":{DEEP}}}'],
            [reset_with('{"episode_id":["\\ud800"]}')],
        ],
        ("VALIDATION_ERROR",),
        (DROPPED,),
        "A bad message is the client's to mend. OpenEnv's reply repeats the bad value, and fails where that holds a "
        "lone surrogate or more than 255 levels.",
        lambda frame, message, playing: any(map(cannot_be_sent, refused_parts(message))),
    ),
    Difference(
        "type in an action",
        [[RESET, step_with('{"type":[]}')], [RESET, step_with('{"type":{}}')]],
        (LAST,),
        ("EXECUTION_ERROR",),
        "An action is the environment's to judge. OpenEnv looks this key up in a table first, where a list or an object "
        "raises TypeError.",
        lambda frame, message, playing: playing and isinstance(action_of(message).get("type"), (list, dict)),
    ),
    Difference(
        "surrogate in an action's key",
        [[RESET, step_with('{"\\ud800":1}')], [RESET, step_with('{"metadata":"\\ud800"}')]],
        (LAST, "EXECUTION_ERROR"),
        (DROPPED,),
        "An action is the environment's to judge, whatever a model wrote in it.",
        lambda frame, message, playing: any(map(cannot_be_sent, refused_in_action(message))),
    ),
    Difference(
        "metadata in an action",
        [[RESET, step_with('{"metadata":5}')], [RESET, step_with('{"metadata":null}')]],
        (LAST, "EXECUTION_ERROR"),
        ("VALIDATION_ERROR",),
        "An action is the environment's to judge. OpenEnv keeps this key for an object.",
        lambda frame, message, playing: bool(refused_in_action(message)),
    ),
    Difference(
        "step out of order",
        [[STEP], [RESET, STEP, STEP]],
        ("EXECUTION_ERROR",),
        (LAST,),
        "A reward from before `reset` or after `done` belongs to no episode: the trainer has a bug, and should know.",
        lambda frame, message, playing: (
            is_whole(message, "step")
            and "data" in message
            and not playing
            and not isinstance(action_of(message).get("type"), (list, dict))
        ),
    ),
    Difference(
        "seed",
        [[reset_with(f'{{"seed":{seed}}}')] for seed in ("-1", "1.0", "true", '"1"')],
        ("VALIDATION_ERROR",),
        (FIRST,),
        "An environment can rely on an integer >= 0. OpenEnv asks the same of POST /reset, but not on the socket.",
        lambda frame, message, playing: (
            is_bad_seed(reset_data(message).get("seed"))
            and isinstance(reset_data(message).get("episode_id"), str | None)
        ),
    ),
    Difference(
        "long episode_id",
        [[reset_with(f'{{"episode_id":"{"e" * 256}"}}')]],
        ("VALIDATION_ERROR",),
        (FIRST,),
        "As above: at most 255 characters, in OpenEnv only on POST /reset.",
        lambda frame, message, playing: (
            isinstance(reset_data(message).get("episode_id"), str) and len(message["data"]["episode_id"]) > 255
        ),
    ),
    Difference(
        "surrogate in episode_id",
        [[reset_with('{"episode_id":"\\ud800"}')]],
        (FIRST,),
        (SPOILED,),
        "What `reset` took, `state` gives back.",
        lambda frame, message, playing: (
            isinstance(reset_data(message).get("episode_id"), str) and cannot_be_sent(message["data"]["episode_id"])
        ),
    ),
    Difference(
        "metadata twice",
        "an observation's keys",
        ("prompt, task_id",),
        ("metadata, prompt, task_id",),
        "Metadata is beside the observation, if there is any. OpenEnv also repeats it inside, for older clients of its "
        "own.",
    ),
    Difference(
        "server full",
        "one session too many",
        ("CAPACITY_REACHED, then closed 1013",),
        ("CAPACITY_REACHED, then closed 1000",),
        "1013 says try again later (IANA's registry of close codes); 1000 would say that all went well.",
    ),
    Difference(
        "session_id in the address",
        "`/ws?session_id=x`, then `state`",
        ("state",),
        (DROPPED,),
        "A query changes nothing: a session is a socket, not a thing to attach to.",
    ),
    Difference(
        "a page in a browser",
        "a handshake with `Origin: http://example.com`",
        ("403",),
        ("101",),
        "Pages must not reach a server on their reader's own machine, unless `--allow-origin` names them.",
    ),
    Difference(
        "missed pings",
        "`reset`, 45 s without a pong, `step`",
        (LAST,),
        ("closed 1011",),
        "A trainer in its optimizer step answers no ping, and means to go on.",
    ),
]


# ---- Random frames ---------------------------------------------------------------------------------------------------

WORDS = ["", "null", "x", "\u00e9\u4e16", "\ud800", "\0", "e" * 256, "NaN", "-1", "reset"]
NAMES = [
    "task_id",
    "seed",
    "episode_id",
    "metadata",
    "answer",
    "type",
    "data",
    "self",
    "func",
    "session_id",
    "",
    "\ud800",
]
NUMBERS = [0, 1, -1, 7, 10**30, True, False, 0.5, -0.0, 1e308, float("nan"), float("-inf")]


def random_frames(seed: int, count: int) -> Iterator[Frame]:
    """Messages from right to almost right to broken, the same ones for the same seed."""
    rng = random.Random(seed)

    def value(depth: int = 0) -> Any:
        draw = rng.random()
        if draw < 0.25 and depth < 3:
            return {rng.choice(NAMES): value(depth + 1) for _ in range(rng.randrange(3))}
        if draw < 0.4 and depth < 3:
            return [value(depth + 1) for _ in range(rng.randrange(3))]
        if draw < 0.42:
            return json.loads(DEEP)
        return rng.choice([None, rng.choice(WORDS), rng.choice(NUMBERS)])

    def action() -> dict[str, Any]:
        return {rng.choice(NAMES): value() for _ in range(rng.randrange(3))}

    def reset() -> dict[str, Any]:
        right = {
            "task_id": "null",
            "seed": rng.randrange(99),
            "episode_id": f"e-{rng.randrange(99)}",
            "question": value(),
        }
        data = {name: item for name, item in right.items() if rng.random() < 0.5}
        if rng.random() < 0.5:
            data[rng.choice(NAMES)] = value()
        return data

    def message() -> Any:
        kind = rng.choice(["reset", "reset", "step", "step", "step", "state", "close", "mcp", rng.choice(WORDS)])
        result: dict[str, Any] = {"type": kind}
        if kind in ("reset", "step", "mcp") and rng.random() < 0.9:
            result["data"] = reset() if kind == "reset" else action()
        match rng.randrange(12):
            case 0:
                result[rng.choice(NAMES)] = value()
            case 1:
                result["data"] = value()
            case 2:
                result["type"] = value()
            case 3:
                return value()
        return result

    def damaged(text: str) -> str:
        place = rng.randrange(len(text) + 1)
        inserted = rng.choice(["", "", "{", "}", "[", '"', ",", ":", "\\", "0", "-", "e", " ", "\0", "\u00e9", text])
        return text[:place] + inserted + text[place + rng.randrange(3) :]

    for _ in range(count):
        text = json.dumps(message())
        if '"step"' in text and rng.random() < 0.7:
            yield RESET  # so that most of the steps are in an episode
        match rng.randrange(16):
            case 0 | 1:
                yield damaged(text)
            case 2:
                yield text.encode() if rng.random() < 0.5 else b"\xff" + text.encode()
            case 3:
                place = rng.randrange(len(text))
                yield [text[:place], text[place:]]
            case _:
                yield text


# ---- The table in the README -----------------------------------------------------------------------------------------


def shown(frame: Frame) -> str:
    """A frame as a cell of the table."""
    text = f"binary {frame.decode('latin-1')}" if isinstance(frame, bytes) else "".join(frame)
    text = text.replace("|", "\\|").encode("ascii", "backslashreplace").decode()
    return f"`{text}`" if len(text) <= 60 else f"`{text[:40]}`... ({len(text):,} characters)"


def markdown() -> str:
    """TABLE as Markdown."""
    lines = ["| difference | sent | this server | OpenEnv 0.10.0 | why |", "|---|---|---|---|---|"]
    for row in TABLE:
        sent = row.examples
        if not isinstance(sent, str):
            sent = "<br>".join(", ".join(map(shown, frames)) for frames in sent)
        lines.append(f"| {row.id} | {sent} | {row.ours[0]} | {row.theirs[0]} | {row.reason} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
