"""Mixture-of-Experts inference for JAX on NVIDIA GPUs."""
