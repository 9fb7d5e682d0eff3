"""The true preference of the example: how good a reply is. It labels the pairs of `data.py`, and in `ppo.toml` it is only looked at.

A reply is an optional lead and a body, "Happy to help! It is Canberra." or just "Canberra". Its quality is a sum of

    right     3 for the right city
    manners   1 for a friendly lead, -1 for a rude one
    complete  0.5 for a whole sentence

and -1 for whatever is not of this form: a second lead, two cities, babble. A policy that finds a text which the reward model likes and
people would not is seen here.
"""

from __future__ import annotations

import re

from whet.types import Trajectory

FRIENDLY = ("Happy to help!", "With pleasure!")
RUDE = ("Not again!", "Obviously!")
RIGHT, MANNERS, COMPLETE, MALFORMED = 3.0, 1.0, 0.5, -1.0
REPLY = re.compile(rf"(?:(?P<lead>{'|'.join(FRIENDLY + RUDE)}) )?(?:(?P<bare>[A-Z][a-z]+)|It is (?P<city>[A-Z][a-z]+)\.)")


def quality(trajectory: Trajectory) -> dict[str, float]:
    """A reward of whet's: the parts of a reply's quality; the total is their sum."""
    return parts(trajectory.response, trajectory.task.label)


def parts(reply: str, answer: str) -> dict[str, float]:
    """What a reply's quality is made of.

    Args:
        reply: the text.
        answer: the right city.
    """
    found = REPLY.fullmatch(reply.strip())
    if found is None:
        return {"right": 0.0, "manners": 0.0, "complete": 0.0, "malformed": MALFORMED}
    lead = found["lead"]
    return {
        "right": RIGHT * ((found["bare"] or found["city"]) == answer),
        "manners": MANNERS * ((lead in FRIENDLY) - (lead in RUDE)),
        "complete": COMPLETE * (found["bare"] is None),
        "malformed": 0.0,
    }
