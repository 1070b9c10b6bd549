"""What a person or a client talks to: settings, command line, page, HTTP API and the services they share."""

__version__ = "0.1.0"
