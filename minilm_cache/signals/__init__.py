"""What a teacher gives in addition to relations: one module for each signal."""
