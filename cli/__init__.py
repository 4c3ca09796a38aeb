"""The command `minilm-cache`: it parses, calls the library, and prints."""
