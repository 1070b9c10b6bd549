"""HTTP: wire schema ↔ Request and Event, errors to statuses, and the guard before every route. No gradio, no torch."""
