"""References: the model in plain PyTorch, and the kernel's arithmetic in NumPy.

Nothing is imported here: `arithmetic` needs NumPy only, `model` brings in torch.
"""
