"""A pure inference library: it knows models and tokens, and nothing of pages, routes or files of results."""
