"""Decoder-only mixture-of-experts language models."""
