"""`python -m whet.cluster.engine_worker`: a process of the engine on a node of a cluster, which dials
its starter."""

from __future__ import annotations

import json

from whet.cluster.process import read_line
from whet.engine.workers.dialing import Invitation
from whet.engine.workers.worker import dial


def line_of(invitation: Invitation) -> str:
    """Line for the standard input of such a process."""
    return json.dumps({"host": invitation.host, "port": invitation.port, "key": invitation.key.hex(), "timeout_s": invitation.timeout_s})


def main() -> None:
    """Be a worker of the engine until the other end is gone."""
    values = json.loads(read_line())
    dial(Invitation(values["host"], values["port"], bytes.fromhex(values["key"]), values["timeout_s"]))


if __name__ == "__main__":
    main()
