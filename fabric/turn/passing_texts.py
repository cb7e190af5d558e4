"""Passing texts: clocks, dates and reminders that clients rewrite for each turn.

A conversation stays the same while only these change. They are left out where conversations are
compared, never from what the model reads.
"""

import re
from typing import Final

_DATE: Final = (
    r"(?:today(?:'s|\u2019s)? (?:date\b|is\b)|(?:the )?current (?:date|day|time)\b"
    r"|date(?: and time)?:)"
)
DATE_LINE: Final = re.compile(
    rf"^[ \t]*(?:[-*>#]+ )?\**{_DATE}[^\n]{{0,160}}$\n?", re.IGNORECASE | re.MULTILINE
)

# Blocks that coding agents put into messages and take out again. A block ends with its own name.
_REMINDER: Final = re.compile(
    r"<(system[-_]reminder|reminder|environment_(?:details|context))>", re.IGNORECASE
)

# Each pattern begins with a small set of characters, which makes the search fast.
_MONTH: Final = (
    r"[ADFJMNOS](?:an|anuary|eb|ebruary|ar|arch|pr|pril|ay|un|une|ul|uly|ug|ugust|ep|ept|eptember"
    r"|ct|ctober|ov|ovember|ec|ecember)\b\.?"
)
_YEAR: Final = r"(?:,? \d{4}\b)?"
_ZONE: Final = r"(?: ?(?:Z\b|UTC\b|GMT\b|[A-Z]{1,4}T\b|[+-]\d{2}:?\d{2}\b)){0,2}"
_TIME: Final = rf":\d{{2}}(?::\d{{2}}(?:[.,]\d{{1,9}})?)?(?: ?[AaPp]\.?[Mm]\b)?{_ZONE}"
_NUMBERS: Final = re.compile(
    rf"[0-9](?:\d?{_TIME}(?: (?:19|20)\d{{2}}\b)?"
    rf"|\d{{3}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}(?:T\d{{1,2}}{_TIME})?"
    r"|\d?[-/.]\d{1,2}[-/.]\d{4}\b"
    rf"|\d?(?:st|nd|rd|th)?\b\.? {_MONTH}{_YEAR}"
    r"|(?<=\b1)[5-9]\d{8}(?:\d{3})?(?:\.\d{1,9})?\b)"  # seconds or milliseconds since 1970
)
_DATES: Final = re.compile(rf"{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?\b{_YEAR}")
_WEEKDAYS: Final = re.compile(
    r"[FMSTW](?:on|ue|ues|ed|ednes|hu|hurs|ri|at|atur|un)"
    rf"(?:day\b,?|\b(?=,? (?:{_MONTH}|\d)))"
)


def without_reminders(text: str) -> str:
    """Return a text without reminders, its white space in one spelling."""
    kept, done, unclosed = list[str](), 0, set[str]()
    for opening in _REMINDER.finditer(text) if "<" in text else ():
        name = opening[1]
        if opening.start() < done or name in unclosed:
            continue
        end = text.find(f"</{name}>", opening.end())
        if end < 0:
            unclosed.add(name)
            continue
        kept.append(text[done : opening.start()])
        done = end + len(f"</{name}>")
    return " ".join(" ".join([*kept, text[done:]]).split())


def without_passing_texts(text: str, *, drops_lines: bool) -> str:
    """Return a text without reminders and clocks; with `drops_lines`, without all lines of a date.

    A user may ask for a date in one line, which must stay.
    """
    if drops_lines:
        text = DATE_LINE.sub("", text)
    text = without_reminders(text)
    for passing in (_WEEKDAYS, _DATES, _NUMBERS):  # the first two look at numbers
        text = passing.sub(" ", text)
    return " ".join(text.split())
