"""The plan explorer. Nothing is imported here: only `widget` needs anywidget."""
