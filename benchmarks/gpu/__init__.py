"""Everything that a GPU decides, measured by one command."""
