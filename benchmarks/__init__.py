"""Speed, memory and exactness, measured: ``python -m benchmarks``. Nothing here is installed."""
