"""What a user did wrong or what is missing, said in one sentence."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """An error a person can act on: what was expected, what was found, what to do.

    The command line prints the message alone and exits with a non-zero code.
    """


class UnknownNameError(UserError, KeyError):
    """A name that is in no registry; lists the nearest known names."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        """Say that no `kind` is called `name` and which of `known` come closest."""
        self.kind, self.name, self.known = kind, name, sorted(known)
        nearest = difflib.get_close_matches(name, self.known, n=3, cutoff=0.4) or self.known
        super().__init__(f"unknown {kind} '{name}'; did you mean {', '.join(nearest)}?")

    def __str__(self) -> str:
        """The message without KeyError's quotes."""
        return str(self.args[0])
