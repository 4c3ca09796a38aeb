"""What students learn: one module for each objective, with the equation of its paper."""
