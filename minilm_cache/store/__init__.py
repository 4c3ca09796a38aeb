"""Caches on disk: layout, writing, reading, verifying. This package knows files and zarr, but no models."""
