"""Huge pages for memory that every decode step reads from end to end, where Linux gives them.

With pages of 4 KiB a processor looks up a page for every thousand numbers: one thread then read 17 GB/s of weights and computed 65 GFLOP/s
with them, with huge pages 29 and 80 (AMD EPYC, Linux 6.18). They are asked for, not needed: nothing but speed depends on them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from pathlib import Path

from torch import Tensor

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SIZE = 2**21
"""Bytes of a huge page on x86-64, and on arm64 with pages of 4 KiB."""
COLLAPSE = 25
"""Linux's MADV_COLLAPSE: exchange the pages that are there, contents and all, for huge ones now."""


def ask_for_huge_pages(tensor: Tensor, *, now: bool) -> None:
    """Ask for huge pages in the whole ones that a tensor on the CPU covers.

    Args:
        tensor: contiguous; its contents stay.
        now: exchange the pages that it has; otherwise those that are not yet written come as huge ones.
    """
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    start, end = -(-start // SIZE) * SIZE, end // SIZE * SIZE
    if start >= end or not _given():
        return
    for advice in (mmap.MADV_HUGEPAGE, *((COLLAPSE,) if now else ())):
        _libc().madvise(start, end - start, advice)  # what it returns is how far it was followed


@cache
def _given() -> bool:
    """True if this system has huge pages, and gives them on request."""
    return sys.platform == "linux" and SETTING.exists() and "[never]" not in SETTING.read_text()


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
