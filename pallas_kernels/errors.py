"""Errors of the whole package: each says where, what was got and what was wanted."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any


class MoeJaxError(Exception):
    """Base of every error this package raises on purpose.

    The four parts are kept as attributes, so that callers need not parse the message.
    """

    def __init__(self, problem: str, *, where: str, got: object, wanted: object):
        super().__init__(f"{where}: {problem}: got {got}, wanted {wanted}")
        self.problem, self.where, self.got, self.wanted = problem, where, got, wanted

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are rebuilt from positional arguments; ours cross process pools all the same.
        make = functools.partial(type(self), self.problem, where=self.where, got=self.got, wanted=self.wanted)
        return make, (), self.__dict__


class InvalidArgument(MoeJaxError, ValueError):
    """A value, shape or dtype handed to a public function that it cannot take."""


class CannotServe(MoeJaxError, NotImplementedError):
    """No back end (or not the one asked for) can serve this call.

    Attributes:
        declined: ``(back end, reason)`` for each back end that was tried.
    """

    def __init__(
        self, problem: str, *, where: str, got: object, wanted: object, declined: Sequence[tuple[str, str]] = ()
    ):
        super().__init__(problem, where=where, got=got, wanted=wanted)
        self.declined = tuple(declined)


class CudaError(MoeJaxError, RuntimeError):
    """A call of the CUDA driver failed; ``got`` is the driver's own name of the error."""


class SlowPathWarning(UserWarning):
    """A faster back end declined and a slower one served the call; said once per reason."""
