"""Where a client's stop strings end an answer."""

from node.dialect.marks import held_chars


class StopStrings:
    """Lets text through up to the stop string that is complete first."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = tuple(text for text in texts if text)
        self._longest = max(map(len, self._texts), default=0)
        self._held = ""
        self.found: str | None = None

    def begin_again(self) -> None:
        """Forget what was read."""
        self._held, self.found = "", None

    def take(self, text: str) -> str:
        """Return what is certain to be in front of any."""
        if not self._texts:
            return text
        if self.found is not None:
            return ""
        self._held += text
        ends = [
            (self._held.find(stop) + len(stop), -len(stop), stop)
            for stop in self._texts
            if stop in self._held
        ]
        if ends:
            end, _, self.found = min(ends)
            shown, self._held = self._held[: end - len(self.found)], ""
            return shown
        at = len(self._held) - held_chars(self._held, self._texts, self._longest)
        shown, self._held = self._held[:at], self._held[at:]
        return shown

    def finish(self) -> str:
        """Return what turned out to be none."""
        held, self._held = self._held, ""
        return held
