"""The one error of the training layer that a user can mend."""

from __future__ import annotations

from mo_fused.errors import message


class InputError(ValueError):
    """Something the user gave cannot be used."""


def bad_input(what: str, *, expected: str, found: str, remedy: str) -> InputError:
    """The error that ``what``, an option, file or package, is not as it has to be; the remedy is an instruction."""
    return InputError(f"{what}: {message(expected, found, remedy)}")
