"""One command a file: NAME, HELP, ORDER, SETTINGS (the settings it heeds), ``arguments(parser)``, ``run(settings, arguments)``."""
