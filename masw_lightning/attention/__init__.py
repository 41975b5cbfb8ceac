"""Attention over raw tokens and memory slots: the dense definition, the fast exact form, and the kernels below both."""
