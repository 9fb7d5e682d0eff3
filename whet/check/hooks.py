"""The functions of a user's that a run calls between its parts: whether they are there, and can be called as they will be."""

from __future__ import annotations

from collections.abc import Iterator

from whet.build.rollouts import PLACES, find_hook
from whet.check.boundary import run_user_code
from whet.check.context import Scene
from whet.check.findings import Note, fail, ok
from whet.check.settings import IMPORT_DEADLINE_S
from whet.config import ConfigError


def check_hooks(scene: Scene) -> Iterator[Note]:
    """Find each of them; none is called."""
    config = scene.rl
    named = {key: reference for key, place in PLACES.items() if (reference := place.named(config)) is not None}
    for key, reference in named.items():
        try:
            run_user_code(f"{key} {reference!r}", lambda: find_hook(config, key), IMPORT_DEADLINE_S)  # noqa: B023
        except ConfigError as error:
            yield from map(fail, error.problems)
        except ValueError as error:
            yield fail(str(error))
        else:
            yield ok(f"{key} {reference} can be called as f({', '.join(PLACES[key].given)})")
    if not named:
        yield ok("none: every step of a rollout is whet's own")
