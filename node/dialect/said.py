"""What an answer says to the client, without the line ends that templates put beside marks."""


class Said:
    """Text of one kind; line ends next to a mark are the template's, all others the model's."""

    def __init__(self, *, has_marks: bool) -> None:
        """Hand text on as it is where no mark can come."""
        self._has_marks = has_marks
        self._is_behind_mark = False
        self._has_text = False
        self._held = ""  # line ends that a mark may follow
        self._cut = ""  # line ends in front of the last mark

    def begin_again(self) -> None:
        """Forget what was said, but not that a mark was met."""
        self._has_text, self._held, self._cut = False, "", ""

    def begin(self, text: str) -> str:
        """Leave out line ends behind a mark."""
        if not self._is_behind_mark:
            return text
        text = text.lstrip("\n")
        self._is_behind_mark = not text
        return text

    def take(self, text: str) -> str:
        """Return what may be shown."""
        if not self._has_marks or not text:
            return text
        if self._cut:  # between text and text they are no template's
            text, self._cut = self._cut + text, ""
        body = text.rstrip("\n")
        if not body:
            self._held += text
            return ""
        shown, self._held = self._held + body, text[len(body) :]
        self._has_text = True
        return shown

    def meet_mark(self) -> None:
        """Forget line ends beside a mark, unless text follows."""
        if not self._is_behind_mark:
            self._cut = (self._held or "\n") if self._has_text else ""
        self._held = ""
        self._is_behind_mark = True

    def miss_mark(self, dropped: str) -> str:
        """Return what stands in front of a mark that was none, with its line ends."""
        self._is_behind_mark, self._cut = False, ""
        self._has_text = True
        return dropped

    def finish(self) -> str:
        """Return what no mark came behind."""
        held, self._held = self._held, ""
        return held

    @property
    def held(self) -> str:
        """Line ends that a mark may follow."""
        return self._held
