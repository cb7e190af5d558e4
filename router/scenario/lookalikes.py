"""Letters of one alphabet that pass for those of another, as in a name that imitates another."""

from typing import Final
from unicodedata import name as name_of

_ALIKE: Final = ("LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE", "COPTIC", "LISU")


def foreign_letter(text: str) -> str | None:
    """Return the first letter of another alphabet than its word begins with, if they look alike."""
    for word in text.split():
        first = ""
        for letter in filter(str.isalpha, word):
            alphabet = name_of(letter, "").partition(" ")[0]
            if alphabet in _ALIKE:
                first = first or alphabet
                if alphabet != first:
                    return letter
    return None
