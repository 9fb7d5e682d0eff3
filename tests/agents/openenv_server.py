"""An OpenEnv server: guess a number. Run in the environment that has openenv: python openenv_server.py PORT."""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int


class Answer(Observation):
    text: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self.now = State(episode_id="none", step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.now = State(episode_id=episode_id, step_count=0)
        return Answer(text=f"Guess a number, {kwargs.get('name')}.", done=False, reward=None)

    def step(self, action, timeout_s=None, **kwargs):
        self.now.step_count += 1
        return Answer(text="right" if action.guess == 7 else "wrong", done=action.guess == 7, reward=float(action.guess == 7))

    @property
    def state(self):
        return self.now


uvicorn.run(create_fastapi_app(Guessing, Guess, Answer, max_concurrent_envs=1), port=int(sys.argv[1]), log_level="warning")
