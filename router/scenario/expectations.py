"""What was to hold behind a phase, judged by what was said."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from router.scenario.complaints import told
from router.scenario.conversation import memory_behind
from router.scenario.scenario import CHECKS, Expectation, Phase, Scenario
from router.scenario.template import MessagesPlace, TextTemplate, VariablePlace, render
from router.scenario.utterance import Said, TurnKey, Utterance


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """Tokens of one turn's prompt, and how many of them were cached."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """One expectation, whether it holds, and what was found instead."""

    expectation: Expectation
    holds: bool
    found: str

    @property
    def is_of_cache(self) -> bool:
        """Say whether it is about figures, and not about what was said."""
        return self.expectation.cached_share_min is not None

    @property
    def expected(self) -> str:
        """Spell what was to hold, in the words of the file."""
        return told(" ".join(_spelled(self.expectation)), 300)


def _spelled(expected: Expectation) -> Iterator[str]:
    if expected.agent is not None:
        yield expected.agent
    for check in CHECKS:
        wanted = getattr(expected, check)
        if isinstance(wanted, float):
            yield f"{check} {wanted:g}"
        elif wanted is not None:
            words = wanted if isinstance(wanted, tuple) else (wanted,)
            shown = (w.source.strip() if isinstance(w, TextTemplate) else w for w in words)
            yield f"{check} " + " or ".join(f"'{word}'" for word in shown)


def judged(
    scenario: Scenario, phase_id: str, said: Said, figures: Mapping[TurnKey, PromptFigures]
) -> tuple[Verdict, ...]:
    """Judge all expectations of a phase that has ended.

    Words are compared without regard to case, and with any white space as one space.
    """
    phase = scenario.phase(phase_id)
    judge = _Judge(scenario, phase, said, figures)
    return tuple(judge.verdict(expected) for expected in phase.expect)


@dataclass(frozen=True, slots=True)
class _Judge:
    scenario: Scenario
    phase: Phase
    said: Said
    figures: Mapping[TurnKey, PromptFigures]

    def verdict(self, expected: Expectation) -> Verdict:
        if expected.cached_share_min is not None:
            return self._cached(expected, expected.cached_share_min)
        assert expected.agent is not None, "was checked when the scenario was read"
        spoken = [u for u in self._utterances() if u.speaker == expected.agent]
        if expected.calls is not None:
            called = sorted({call.name for u in spoken for step in u.steps for call in step.calls})
            return Verdict(
                expected, expected.calls in called, "called " + (", ".join(called) or "nothing")
            )
        if expected.says is not None or expected.never_says is not None:
            texts = "\n".join(u.text for u in spoken)
            shown = "said " + told(" / ".join(u.text.strip() for u in spoken), 300)
        else:
            texts = memory_behind(self.scenario, self.said, expected.agent, self.phase.id).told
            shown = ""
        wanted = expected.says or expected.hears
        if wanted is not None:
            holds = self._first_within(wanted, texts) is not None
            return Verdict(expected, holds, shown or ("heard it" if holds else "never heard it"))
        unwanted = expected.never_says or expected.never_hears
        assert unwanted is not None, "an expectation has exactly one check"
        found = self._first_within(unwanted, texts)
        return Verdict(
            expected, found is None, shown or (f"heard '{found}'" if found else "never heard it")
        )

    def _cached(self, expected: Expectation, least: float) -> Verdict:
        turns = (u.turn for u in self._utterances() if expected.agent in {None, u.speaker})
        found = [self.figures[turn] for turn in turns if turn in self.figures]
        prompts = sum(figure.prompt_tokens for figure in found)
        share = sum(figure.cached_tokens for figure in found) / prompts if prompts else 0.0
        return Verdict(expected, share >= least, f"{share:.3f} of {prompts:,} tokens were cached")

    def _utterances(self) -> Iterator[Utterance]:
        for number, speaker in self.phase.turns:
            utterance = self.said.get(TurnKey(self.phase.id, number, speaker))
            if utterance is not None:
                yield utterance

    def _first_within(
        self, words: TextTemplate | Collection[TextTemplate], text: str
    ) -> str | None:
        several = (words,) if isinstance(words, TextTemplate) else words
        folded = _folded(text)
        options = (render(option, self._fill) for option in several)
        return next((option for option in options if _folded(option) in folded), None)

    def _fill(self, place: VariablePlace | MessagesPlace) -> Iterator[str]:
        assert isinstance(place, VariablePlace), "was checked when the scenario was read"
        yield self.scenario.variables[place.name]


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())
