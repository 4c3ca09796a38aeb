"""`python -m minilm_cache`: the command line."""

from minilm_cache.cli.entry import main

if __name__ == "__main__":
    main()
