"""A reward with a mistake in it."""


def score(trajectory):
    return trajectory.task.metadata["no_such_key"]
