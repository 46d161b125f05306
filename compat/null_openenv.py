# SPDX-License-Identifier: 0BSD
"""The null environment of ../server.py on OpenEnv's own server: the other side of every comparison.

`python null_openenv.py` serves it on a free port of 127.0.0.1 and prints the address; `uvicorn null_openenv:app` serves
it as anybody would. The variable MAX_CONCURRENT_ENVS is the number of sessions (1000).
"""

import os
import socket
import uuid
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State
from pydantic import ConfigDict

TASKS = {"null": "Send any action: it ends the episode with reward 0.5."}


class NullAction(Action):
    """Any object. OpenEnv's own Action allows no key that it does not declare."""

    model_config = ConfigDict(extra="allow")


class NullObservation(Observation):
    """What `reset` and `step` return. `reset` adds the prompt."""

    model_config = ConfigDict(extra="allow")
    task_id: str | None


class NullState(State):
    """What `state` returns, beside `episode_id` and `step_count`."""

    task_id: str | None = None
    done: bool = False


class NullEnvironment(Environment[NullAction, NullObservation, NullState]):
    """One task; any action ends the episode with reward 0.5. Written as OpenEnv's template for environments is."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = NullState()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, task_id: str | None = None, **kwargs: Any
    ) -> NullObservation:
        wanted = "null" if task_id is None else task_id
        if wanted not in TASKS:
            raise ValueError(f"unknown task_id {wanted!r}; known: {', '.join(TASKS)}")
        given = str(uuid.uuid4()) if episode_id is None else episode_id
        self._state = NullState(episode_id=given, task_id=wanted)
        return NullObservation(task_id=wanted, prompt=TASKS[wanted])

    def step(self, action: NullAction, timeout_s: float | None = None, **kwargs: Any) -> NullObservation:
        self._state.step_count += 1
        self._state.done = True
        return NullObservation(task_id=self._state.task_id, reward=0.5, done=True)

    @property
    def state(self) -> NullState:
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name="null", description="Any action ends the episode with reward 0.5.")


app = create_fastapi_app(
    NullEnvironment,
    NullAction,
    NullObservation,
    max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "1000")),
    state_cls=NullState,
)


def main() -> None:
    """Serves until a signal. The socket listens before its address is printed, so that a client may connect at once."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"listening on ws://127.0.0.1:{listener.getsockname()[1]}/ws", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
