"""What the benchmark commands share: models of given shapes, filled caches, timers, memory peaks, result files.

The commands `scripts/bench_*.py` hold one table each and nothing that another needs; they import from here.
"""
