"""`vllm serve` by the Python that has vLLM.

    python -m whet_vllm.serve MODEL --port 8000 ...
    python -m whet_vllm.serve MODEL --headless --nnodes 2 --node-rank 1 --master-addr HOST --master-port PORT ...

vLLM's own command asks for a package of the name `vllm`, which its builds for CPUs are not: without one, its part is called directly.
"""

import os
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version


def main() -> None:
    words = ["serve", *sys.argv[1:]]
    try:
        version("vllm")
    except PackageNotFoundError:
        serve_directly(words)
        return
    command = next(iter(entry_points(group="console_scripts", name="vllm")))
    sys.argv = ["vllm", *words]
    command.load()()


def serve_directly(words: list[str]) -> None:
    """As vLLM's command does it."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    parser, command = FlexibleArgumentParser("vllm"), ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=True))
    args = parser.parse_args(words)
    command.validate(args)
    command.cmd(args)


if __name__ == "__main__":
    main()
