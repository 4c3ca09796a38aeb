"""Stage three: fine-tune teachers, assistants and students alike on downstream tasks, and score them."""
