"""The speed-of-light calculator. Nothing is imported here: only `widget` needs ipywidgets."""
