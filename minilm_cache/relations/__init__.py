"""Relations of a teacher and a student on a batch, and the loss between them: pure torch."""
