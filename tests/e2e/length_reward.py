"""A reward that varies whatever the model writes."""


def score(trajectory):
    return len(trajectory.response) % 7 / 7
