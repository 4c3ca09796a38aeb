"""Measurements behind the numbers in README, docs and docstrings. See README.md here."""
