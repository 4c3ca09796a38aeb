"""Teachers and students: loading, shapes, sizes, and the tap that returns their vectors."""
