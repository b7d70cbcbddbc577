"""Kernels of mixture-of-experts inference, one folder per operation.

Each operation has an `api` (checks, choice of back end), a plain `jax.numpy` `reference` and its
kernels. Nothing here knows of plans, graphs or models.
"""
