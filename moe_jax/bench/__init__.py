"""Measure the kernels beside what users have without them. The command is ``moe-jax bench``."""
