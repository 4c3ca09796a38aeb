"""A study: shapes x objectives x caches x seeds, one table and one page."""
