"""Token counts at which a prompt's parts end, and at which later prompts may differ.

    |system, tools|user ...|assistant ...|tool ...|<answer begins> <thought opened>|
                 head   asked                 conversation                   whole prompt

The template's text after `conversation` opens the answer (the generation prompt). A later prompt
may have another opening, or none: a thought that was opened for the model is dropped.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PromptMarks:
    """Token counts of a prompt's parts; 0 for a part that does not exist or was not looked for."""

    head: int = 0  # all before the first message of the user: what conversations share
    asked: int = 0  # up to the end of the user's last message, if other messages follow it
    conversation: int = 0  # all but the opening of the answer
    opens_more: bool = False  # the opening is more than the role: a thought, say
    trims_answers: bool = False  # the template trims the end of earlier answers
    # Where other prompts differ, or may; found for each prompt, and in no record.
    branches: tuple[int, ...] = ()

    def with_branch(self, tokens_count: int) -> "PromptMarks":
        """Return the marks with one more branch."""
        return replace(self, branches=(*self.branches, tokens_count))

    def within(self, tokens_count: int) -> "PromptMarks":
        """Return the marks of a prompt cut to so many tokens."""
        return PromptMarks(
            min(self.head, tokens_count),
            min(self.asked, tokens_count),
            min(self.conversation, tokens_count),
        )


NO_MARKS = PromptMarks()
