"""Caches on disk: layout, writing, reading, verifying. Knows files and zarr, not models."""
