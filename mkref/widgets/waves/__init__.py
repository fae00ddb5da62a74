"""Wave quantization and back-fill. Nothing is imported here: only `widget` needs ipywidgets."""
