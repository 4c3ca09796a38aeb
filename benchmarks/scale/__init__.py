"""Measure what grows with text, shards, requests and ranks."""
