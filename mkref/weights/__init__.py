"""Weights: how they lie in memory, how they come from a checkpoint, and synthetic ones.

Nothing is imported here: `layout` needs NumPy only, `checkpoint` and `synthetic` bring in torch.
"""
