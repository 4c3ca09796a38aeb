"""How relations become rows of arrays and come back. Knows tensors, not files."""
