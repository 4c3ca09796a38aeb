"""Benchmarks that measure the numbers in README, docs and docstrings. See README.md in this folder."""
