"""Use cases shared by page, API and command line. Nothing here imports gradio, fastapi or torch."""
