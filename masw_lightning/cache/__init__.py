"""Key/value caches for decoding: the whole history (``full``) or a compact memory (``compact``), one contract."""
