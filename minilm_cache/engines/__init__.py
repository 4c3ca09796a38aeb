"""Run work here, or as tasks of a Ray cluster."""
