"""What the scripts here share: how they say what they refuse, and checks of options."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection

from moe_jax.errors import InvalidArgument, MoeJaxError
from moe_jax.pallas_kernels.device import MINIMUM_CAPABILITY


def told(main: Callable[[], object]) -> None:
    """Run a script: an error that says what is wrong is one line on stderr, and exit code 2."""
    try:
        main()
    except (MoeJaxError, OSError, json.JSONDecodeError) as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def check_capability(capability: int) -> None:
    """Refuse what no kernel is compiled for.

    Raises:
        InvalidArgument: it is too old.
    """
    if capability < MINIMUM_CAPABILITY:
        wanted = f"{MINIMUM_CAPABILITY} or more"
        raise InvalidArgument("compute capability", where="--capability", got=capability, wanted=wanted)


def some_of(option: str, text: str, known: Collection[str]) -> list[str]:
    """Names with commas between.

    Raises:
        InvalidArgument: one is unknown.
    """
    names = text.split(",")
    if not set(names) <= set(known):
        raise InvalidArgument("names", where=option, got=repr(text), wanted=f"some of {','.join(known)}")
    return names
