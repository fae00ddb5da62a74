"""The ring over time. Nothing is imported here: only `widget` needs ipywidgets."""
