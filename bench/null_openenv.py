# SPDX-License-Identifier: 0BSD
# mypy: ignore-errors
"""The null environment of server.py on OpenEnv's own server: `python null_openenv.py PORT [async]`."""

import sys
from typing import Any
from uuid import uuid4

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class NullAction(Action, extra="allow"):
    """Any object at all."""


class NullObservation(Observation):
    """What `reset` and `step` answer."""

    task_id: str = "null"
    prompt: str | None = None


class Null(Environment[NullAction, NullObservation, State]):
    """Any action ends the episode with reward 0.5."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **data: Any) -> NullObservation:
        """Starts an episode."""
        self.state = State(episode_id=episode_id or str(uuid4()))
        return NullObservation(prompt="Send any action: it ends the episode with reward 0.5.")

    def step(self, action: NullAction, timeout_s: float | None = None, **data: Any) -> NullObservation:
        """Ends it."""
        self.state.step_count += 1
        return NullObservation(reward=0.5, done=True)


class AsyncNull(Null):
    """The same with `async` methods, which the server calls without a thread."""

    async def reset_async(self, **data: Any) -> NullObservation:
        """As above."""
        return self.reset(**data)

    async def step_async(self, action: NullAction, **data: Any) -> NullObservation:
        """As above."""
        return self.step(action)


environment = AsyncNull if sys.argv[2:] == ["async"] else Null
app = create_app(environment, NullAction, NullObservation, env_name="null", max_concurrent_envs=2**20)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
