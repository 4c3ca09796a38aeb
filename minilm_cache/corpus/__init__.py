"""From text to sequences of token ids, whole or masked."""
