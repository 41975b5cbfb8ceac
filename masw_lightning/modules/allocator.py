"""Giving freed memory back to the system while training on a CPU. Knows the C library's allocator, nothing of models.

glibc keeps freed blocks of up to 32 MiB in a heap, a limit it raises by itself. A training step makes and frees tensors
of many sizes around the ones it has to keep, so that heap fills with holes: at 8,192 tokens it held almost three times
what the tensors needed (``docs/results/speed_notes.md``). Blocks that are mapped one by one leave no holes.
"""

import ctypes
import sys

BLOCK = 1 << 20  # bytes; smaller blocks stay in the heap, where they are fast
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of <malloc.h>


def return_freed_blocks() -> bool:
    """Map every block of at least ``BLOCK`` bytes by itself from now on, in the whole process.

    Returns:
        whether this C library can (glibc on Linux); elsewhere nothing is changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, BLOCK))
