# SPDX-License-Identifier: 0BSD
"""Measures this server, a bare echo of the same library, and OpenEnv's server, in one run and in turn.

Each server has one core, the load (load.py) another. Prints a table, and writes it to RESULTS.md with chart.svg, which
shows the two main figures. The variable BENCH_PYTHON names the Python of this server and of the echo.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import load

HERE = Path(__file__).parent
PYTHON = os.environ.get("BENCH_PYTHON", str(HERE.parent / ".venv/bin/python"))
OURS, ECHO, OPENENV, ASYNC, PEER = "this server", "bare echo", "OpenEnv", "async OpenEnv", "bare peer"
COMMANDS = {
    OURS: [
        PYTHON,
        str(HERE.parent / "server.py"),
        "--max-sessions",
        "16500",
        "--log-level",
        "warning",
        "--port",
        "PORT",
    ],
    ECHO: [PYTHON, str(HERE / "echo.py"), "PORT"],
    OPENENV: [sys.executable, str(HERE / "null_openenv.py"), "PORT"],
    ASYNC: [sys.executable, str(HERE / "null_openenv.py"), "PORT", "async"],
    PEER: [sys.executable, str(HERE / "load.py"), "PORT"],
}
RIVALS = (OURS, ECHO, OPENENV)
SESSIONS = (1, 64, 1024)
BUSY = 64  # the number that the comparisons are about
CONCURRENCY = 32  # episodes at once
HELD = 2000
START_LIMIT = 60  # seconds
Results = dict[str, dict[str, list[load.Figures]]]  # by measurement and server: one of each round


# ---- The runs --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(name: str, core: int) -> Iterator[tuple[load.Server, float]]:
    """Starts a server on a core. Gives it when it has played an episode, with the seconds that this took."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    started = time.perf_counter()
    with subprocess.Popen([{"PORT": str(port)}.get(word, word) for word in COMMANDS[name]]) as process:
        try:
            os.sched_setaffinity(process.pid, {core})
            while True:
                try:
                    replies = load.first_episode(port, echo=name in (ECHO, PEER))
                    break
                except ConnectionRefusedError:
                    if process.poll() is not None or time.perf_counter() - started > START_LIMIT:
                        raise
                    time.sleep(0.001)
            yield load.Server(port, process.pid, replies), time.perf_counter() - started
        finally:
            process.kill()


def measure(call: Callable[..., load.Figures], core: int, quick: bool) -> Results:
    """All measurements, each in turn for each server. `call` runs a function in the process of the load."""
    results: Results = {}

    def note(measurement: str, name: str, figures: load.Figures) -> None:
        results.setdefault(measurement, {}).setdefault(name, []).append(figures)
        shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
        print(f"{measurement:>10} {name:>13}: {shown}", file=sys.stderr)

    rounds, seconds = (2, 0.4) if quick else (5, 1.0)
    for _ in range(rounds):
        for name in RIVALS:
            with running(name, core) as (server, ready):
                note("start", name, {"seconds": ready, "bytes": load.resident(server.pid)})
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(running(name, core))[0] for name in COMMANDS}

        def alone(measured: Callable[..., load.Figures], name: str, *args: float) -> load.Figures:
            """Measures when no server on the core is at work any more at the end of an earlier measurement."""
            before, deadline = -1.0, time.perf_counter() + START_LIMIT
            while (used := sum(load.processor_time(server.pid) for server in servers.values())) > before:
                if time.perf_counter() > deadline:
                    raise TimeoutError("a server does not come to rest")
                before = used
                time.sleep(0.1)
            return call(measured, servers[name], *args)

        for name in RIVALS:
            note("held", name, alone(load.held, name, HELD))
        for _ in range(rounds):
            for sessions in SESSIONS:
                for name in COMMANDS if sessions == BUSY else RIVALS:
                    note(f"steps {sessions}", name, alone(load.steps, name, sessions, seconds))
            for name in COMMANDS:
                note("episodes", name, alone(load.episodes, name, CONCURRENCY, seconds))
    idle, total, windows = (1000, 2048, (2, 4)) if quick else (10000, 16384, (4, 21))
    for name in RIVALS:
        with running(name, core) as (server, _):
            note("crowd", name, call(load.crowd, server, idle, total, windows))
    return results


# ---- The report ------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def table(results: Results) -> str:
    """The results as a Markdown table."""

    def row(label: str, measurement: str, key: str, scale: float = 1, ratios: bool = True) -> str:
        found = {name: [scale * figures[key] for figures in rounds] for name, rounds in results[measurement].items()}
        cells = [number(median(found[name])) for name in RIVALS]
        for name in (ECHO, OPENENV):
            pairs = zip(found[OURS], found[name], strict=True)
            cells.append(f"{median(ours / theirs for ours, theirs in pairs):.2f}" if ratios else "")
        return f"| {label} | {' | '.join(cells)} |"

    idle = int(results["crowd"][OURS][0]["idle"])
    lines = [
        f"| | {' | '.join(RIVALS)} | to the echo | to OpenEnv |",
        "|---|---:|---:|---:|---:|---:|",
        row("First episode after the start, s", "start", "seconds"),
        row("Memory at rest, MB", "start", "bytes", 1e-6),
        row(f"Memory per session, of {HELD:,} held, kB", "held", "bytes", 1e-3),
    ]
    for sessions in SESSIONS:
        what = f"{sessions:,} session{'s' * (sessions > 1)}"
        lines.append(row(f"**Steps per second, {what}**", f"steps {sessions}", "rate"))
        lines += [row(f"latency, {what}, {key}, ms", f"steps {sessions}", key) for key in ("p50", "p99")]
    lines += [
        row(f"Processor time per step, {BUSY} sessions, µs", f"steps {BUSY}", "cost"),
        row(f"core of the server busy, {BUSY} sessions, %", f"steps {BUSY}", "server", 100, ratios=False),
        row(f"core of the load busy, {BUSY} sessions, %", f"steps {BUSY}", "load", 100, ratios=False),
        row(f"**Episodes per second, {CONCURRENCY} at once**", "episodes", "rate"),
        row("Sessions held by one process, all stepped", "crowd", "total", ratios=False),
        row("memory then, MB", "crowd", "bytes", 1e-6),
        row("one reset and one step in each took, s", "crowd", "took"),
        row("p99 of 64 sessions, ms", "crowd", "alone"),
        row(f"p99 of 64 sessions beside {idle:,} idle ones, ms", "crowd", "beside"),
        row("that over the one without them", "crowd", "ratio", ratios=False),
    ]
    return "\n".join(lines)


def report(results: Results, command: str, versions: str) -> str:
    """The whole page."""

    def of(measurement: str, name: str, key: str) -> float:
        return median(figures[key] for figures in results[measurement][name])

    return f"""# Benchmark

{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, `{command}`. {versions}

{table(results)}

All servers run the null environment (the echo: none) on one core, in turn, {len(results["start"][OURS])} rounds; the
figures are medians, and each ratio is the median of the rounds' ratios. Memory per session, and the rows from "sessions
held" on, are of one round.

- A step is one message and its reply. Each session alternates `reset` and `step`, since a step ends the null
  environment's episode; both count. The echo gets the same frames and sends them back. No compression anywhere.
- OpenEnv's environment has plain methods, as those of its template have. With `async` ones its server makes
  {number(of(f"steps {BUSY}", ASYNC, "rate"))} steps and {number(of("episodes", ASYNC, "rate"))} episodes per second.
- An episode is a whole socket: connect, opening handshake, `reset`, `step`, closing handshake.
- The start ends with the end of the first episode, from the start of the process. Memory is the resident set; a held
  session is in the middle of an episode.
- The load runs on the other core and never sleeps, because the server would pay for waking it; it is busy while it reads
  and writes. Against a bare peer, which does nothing else either, it reaches {number(of(f"steps {BUSY}", PEER, "rate"))} steps
  and {number(of("episodes", PEER, "rate"))} episodes per second: the servers are the limit.
- A server whose core was busy with it for less than 90% of the time shared it with other programs. Then the processor
  time per step says more than the rates.

![Steps and episodes per second](chart.svg)
"""


def chart(results: Results) -> str:
    """The two main figures as an SVG, in colours that can be read on white and on black."""
    panels = (
        (f"Steps per second, {BUSY} sessions", f"steps {BUSY}"),
        ("Episodes per second", "episodes"),
    )
    shapes = []
    for n, (title, measurement) in enumerate(panels):
        rates = {name: median(figures["rate"] for figures in results[measurement][name]) for name in RIVALS}
        left, widest = 20 + 390 * n, max(rates.values())
        shapes.append(f'<text x="{left}" y="28" font-weight="bold">{title}</text>')
        for line, (name, rate) in enumerate(rates.items()):
            top, width = 44 + 40 * line, 190 * rate / widest
            colour = "#2f81f7" if name == OURS else "#8b949e"
            shapes.append(f'<text x="{left}" y="{top + 18}">{name}</text>')
            shapes.append(f'<rect x="{left + 100}" y="{top}" width="{width:.0f}" height="26" rx="3" fill="{colour}"/>')
            shapes.append(f'<text x="{left + 108 + width:.0f}" y="{top + 18}">{number(rate)}</text>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 170" font-family="system-ui, sans-serif"'
        f' font-size="15" fill="#7a828e" role="img">\n{chr(10).join(shapes)}\n</svg>\n'
    )


def versions() -> str:
    """What was measured, on what."""
    code = "import platform, websockets; print(platform.python_version(), websockets.__version__)"
    python, library = subprocess.check_output([PYTHON, "-c", code], text=True).split()
    with open("/proc/cpuinfo") as file:
        model = next(
            (line.partition(":")[2].strip() for line in file if line.startswith("model name")), platform.machine()
        )
    theirs = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("openenv", "uvicorn", "websockets"))
    return (
        f"Python {python} and websockets {library}; OpenEnv on Python {platform.python_version()} with {theirs}."
        f" Linux {platform.release()} on {os.cpu_count()} cores of {model}."
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, fewer sessions: for CI")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for RESULTS.md, chart.svg and results.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the servers end, too
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("only one core: the load takes from the servers, so only compare", file=sys.stderr)
    os.sched_setaffinity(0, cores[-1:])  # inherited by the load
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        results = measure(lambda *args: pool.submit(*args).result(), cores[0], options.quick)
    page = report(results, f"python bench/bench.py{' --quick' if options.quick else ''}", versions())
    print(page)
    options.output.mkdir(exist_ok=True)
    (options.output / "RESULTS.md").write_text(page)
    (options.output / "chart.svg").write_text(chart(results))
    (options.output / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
