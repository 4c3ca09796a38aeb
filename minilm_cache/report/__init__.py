"""One page about runs: tables, curves, trade-offs, attention maps, similarity of layers, provenance."""
