"""Batching rules of the operators for torch.vmap."""
