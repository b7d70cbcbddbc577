"""Compiled executables under stable program keys."""
