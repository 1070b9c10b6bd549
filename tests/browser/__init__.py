"""A package, so that the browser and both servers end with the last test in here: their event loop would be in others way."""
