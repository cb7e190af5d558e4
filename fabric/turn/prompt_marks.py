"""Where a prompt's parts end, in tokens: the places at which later prompts go other ways.

    |system, tools|user ...|assistant ...|tool ...|<answer begins> <thought opened>|
                 head   asked                 conversation                   whole prompt

What the template writes behind `conversation` opens the answer (the generation prompt). It may
come back otherwise, or not at all: a thought that was opened for the model is gone.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PromptMarks:
    """Token counts; 0 where there is no such place, or nobody looked."""

    head: int = 0  # all before the first message of the user: what conversations share
    asked: int = 0  # up to the end of the user's last message, where it is not the last of all
    conversation: int = 0  # all but the opening of the answer
    opens_more: bool = False  # the opening is more than the name of who speaks: a thought, say
    trims_answers: bool = False  # answers come back without the white space that they end with
    # Where other prompts go, or went, other ways; found anew for each prompt, no record has them.
    branches: tuple[int, ...] = ()

    def with_branch(self, tokens_count: int) -> "PromptMarks":
        """Return them with one more place where others go another way."""
        return replace(self, branches=(*self.branches, tokens_count))

    def within(self, tokens_count: int) -> "PromptMarks":
        """Return those of a prompt of which only so many tokens are there."""
        return PromptMarks(
            min(self.head, tokens_count),
            min(self.asked, tokens_count),
            min(self.conversation, tokens_count),
        )


NO_MARKS = PromptMarks()
