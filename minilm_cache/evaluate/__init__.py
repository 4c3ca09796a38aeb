"""Stage three: fine-tune teachers, teacher assistants and students on downstream tasks, and score them."""
