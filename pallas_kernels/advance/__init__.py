"""The end of a decode step on the device: drawn tokens become the next step's inputs."""

from .specs import LENGTH, RUNNING, STOPPED, advance_spec

__all__ = ["LENGTH", "RUNNING", "STOPPED", "advance_spec"]
