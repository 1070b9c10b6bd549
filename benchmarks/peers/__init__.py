"""Gainz beside other engines on the same weights: `python -m benchmarks.peers --help`."""
