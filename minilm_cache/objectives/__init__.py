"""What students learn: one row in `spec.py` and one module for each objective."""
