"""Smaller variants of a model: GPTQ and AWQ, on transformers' modules, streamed layer by layer.

Knows how weights are measured, rounded and written. Never knows services, backends' files or the page.
"""
