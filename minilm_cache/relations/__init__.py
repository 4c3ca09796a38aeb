"""What a teacher and a student say about a batch, and the loss between them: pure torch."""
