"""Teachers and students: loading, shapes, sizes, and the tap that hands out their vectors."""
