# SPDX-License-Identifier: 0BSD
"""Plays episodes with an older client of OpenEnv, and prints what it was told as JSON.

`.venv-openenv-old/bin/python older_client.py http://127.0.0.1:8000`. The client class is the one that every environment's
own client extends; older packages have no ready-made one. `sync` came with the asynchronous clients (0.2.2).
"""

import concurrent.futures
import dataclasses
import importlib.metadata
import json
import sys
from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient


class Client(EnvClient[dict[str, Any], dict[str, Any], dict[str, Any]]):
    """Actions, observations and states are dicts."""

    def _step_payload(self, action: dict[str, Any]) -> dict[str, Any]:
        return action

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[dict[str, Any]]:
        return StepResult(payload["observation"], payload["reward"], payload["done"])

    def _parse_state(self, payload: dict[str, Any]) -> dict[str, Any]:
        return payload


def play(url: str, episode_id: str) -> list[Any]:
    """Two episodes on one client, the first with a mistake in the middle."""
    client = Client(base_url=url)
    told: list[Any] = []
    with client.sync() if hasattr(client, "sync") else client as env:
        told.append(dataclasses.asdict(env.reset(task_id="null", seed=7, episode_id=episode_id)))
        try:
            env.reset(task_id="nope")
        except RuntimeError as exc:
            told.append(str(exc))
        told.append(dataclasses.asdict(env.step({"answer": "done"})))
        told.append(env.state())
        env.reset(episode_id=f"{episode_id} again")
        told.append(dataclasses.asdict(env.step({})))
        told.append(env.state())
    return told


def main() -> None:
    """One client, then 16 at once; the version goes first."""
    url = sys.argv[1]
    names = [f"e-{number}" for number in range(17)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        told = [play(url, names[0]), *pool.map(lambda name: play(url, name), names[1:])]
    print(json.dumps([importlib.metadata.version("openenv-core"), *told]))


if __name__ == "__main__":
    main()
