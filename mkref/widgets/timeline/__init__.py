"""The SM timeline. Nothing is imported here: only `widget` needs anywidget."""
