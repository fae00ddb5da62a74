"""The paged KV cache and the batch. Nothing is imported here: only `widget` needs anywidget."""
