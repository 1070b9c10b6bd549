"""The engine: sequences, pages, steps. It knows models and tokens; nothing of services, routes or files of results."""
