"""The command `minilm-cache`: it parses arguments, calls the library and prints results."""
