"""Builds a grammar in a process of its own, which is run as a file and ends with it.

Some short grammars take any time and memory to build (a schema's `multipleOf` has as many states as its
number), and nothing can stop that in a thread.
"""

from __future__ import annotations

import json
import resource
import sys

CPU_LIMIT_S = 4
MEMORY_LIMIT_BYTES = 1 << 29
"""Memory in addition to that of the process at its start."""
BEGUN = b"."
"""Said on standard output when all is there to build with: what ends the process from then on is the grammar."""


def main() -> None:
    """Build the grammar that standard input describes. Only its size is checked here; other faults are
    reported when it is built again."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    request = json.load(sys.stdin.buffer)
    tokenizer = LLTokenizer("byte")
    sys.stdout.buffer.write(BEGUN)
    sys.stdout.flush()
    _limit()
    try:
        LLMatcher(tokenizer, request["text"], log_level=0, limits=LLParserLimits(**request["limits"]))
    except MemoryError:
        raise
    except BaseException:  # another package's code over anybody's text: a panic of Rust code is no Exception
        return


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    spent = resource.getrusage(resource.RUSAGE_SELF)
    most_s = int(spent.ru_utime + spent.ru_stime) + 1 + CPU_LIMIT_S
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
    if sys.platform == "linux":  # elsewhere the system bounds no address space
        with open("/proc/self/statm") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
