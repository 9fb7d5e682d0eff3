"""`vllm serve --headless` by the Python that has vLLM: the process on one of a server's further nodes.

    python -m whet_vllm.headless MODEL --headless --nnodes 2 --node-rank 1 --master-addr HOST --master-port PORT ...

vLLM's own command asks for a package of the name `vllm`, which its builds for CPUs are not.
"""

import os
import sys


def main() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")  # as vLLM's command sets it
    parser, command = FlexibleArgumentParser(), ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=True))
    args = parser.parse_args([command.name, *sys.argv[1:]])
    command.validate(args)
    command.cmd(args)


if __name__ == "__main__":
    main()
