"""`python -m moe_jax`: the command line where the package is not installed."""

from moe_jax.cli import main

main()
