"""Expectations of a phase, judged by the transcript and the figures of its turns."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from router.scenario.conversation import history_after
from router.scenario.diagnostics import shorten
from router.scenario.scenario import CHECKS, Expectation, Phase, Scenario
from router.scenario.template import MessagesPlace, TextTemplate, VariablePlace, render
from router.scenario.transcript import RunTranscript, TurnKey, Utterance


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """Tokens of one turn's prompt, and how many of them were cached."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of an expectation: whether it holds, and what was found."""

    expectation: Expectation
    holds: bool
    found: str

    @property
    def is_of_cache(self) -> bool:
        """Return whether the expectation is about cached tokens, not about words."""
        return self.expectation.cached_share_min is not None

    @property
    def expected(self) -> str:
        """Return the expectation in the words of the file."""
        return shorten(" ".join(_spell_expected(self.expectation)), 300)


def _spell_expected(expected: Expectation) -> Iterator[str]:
    if expected.agent is not None:
        yield expected.agent
    for check in CHECKS:
        value = getattr(expected, check)
        if isinstance(value, float):
            yield f"{check} {value:g}"
        elif value is not None:
            words = value if isinstance(value, tuple) else (value,)
            texts = (w.source.strip() if isinstance(w, TextTemplate) else w for w in words)
            yield f"{check} " + " or ".join(f"'{word}'" for word in texts)


def judge_phase(
    scenario: Scenario,
    phase_id: str,
    transcript: RunTranscript,
    figures: Mapping[TurnKey, PromptFigures],
) -> tuple[Verdict, ...]:
    """Return the verdicts on a phase that has ended.

    Words are compared without case, and with any white space as one space.
    """
    phase = scenario.phase(phase_id)
    judge = _Judge(scenario, phase, transcript, figures)
    return tuple(judge.verdict(expected) for expected in phase.expect)


@dataclass(frozen=True, slots=True)
class _Judge:
    scenario: Scenario
    phase: Phase
    transcript: RunTranscript
    figures: Mapping[TurnKey, PromptFigures]

    def verdict(self, expected: Expectation) -> Verdict:
        if expected.cached_share_min is not None:
            return self._check_cached(expected, expected.cached_share_min)
        assert expected.agent is not None, "the reader requires an agent"
        utterances = [u for u in self._utterances() if u.speaker == expected.agent]
        if expected.calls is not None:
            steps = (step for utterance in utterances for step in utterance.steps)
            called = sorted({call.name for step in steps for call in step.calls})
            return Verdict(
                expected, expected.calls in called, "called " + (", ".join(called) or "nothing")
            )
        if expected.says is not None or expected.never_says is not None:
            texts = "\n".join(u.text for u in utterances)
            shown = "said " + shorten(" / ".join(u.text.strip() for u in utterances), 300)
        else:
            texts = history_after(
                self.scenario, self.transcript, expected.agent, self.phase.id
            ).heard
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

    def _check_cached(self, expected: Expectation, least: float) -> Verdict:
        turns = (u.turn for u in self._utterances() if expected.agent in {None, u.speaker})
        figures = [self.figures[turn] for turn in turns if turn in self.figures]
        prompts = sum(figure.prompt_tokens for figure in figures)
        share = sum(figure.cached_tokens for figure in figures) / prompts if prompts else 0.0
        return Verdict(expected, share >= least, f"{share:.3f} of {prompts:,} tokens were cached")

    def _utterances(self) -> Iterator[Utterance]:
        for number, speaker in self.phase.turns:
            utterance = self.transcript.get(TurnKey(self.phase.id, number, speaker))
            if utterance is not None:
                yield utterance

    def _first_within(
        self, words: TextTemplate | Collection[TextTemplate], text: str
    ) -> str | None:
        alternatives = (words,) if isinstance(words, TextTemplate) else words
        folded = _fold_text(text)
        options = (render(option, self._fill) for option in alternatives)
        return next((option for option in options if _fold_text(option) in folded), None)

    def _fill(self, place: VariablePlace | MessagesPlace) -> Iterator[str]:
        assert isinstance(place, VariablePlace), "the reader refuses messages here"
        yield self.scenario.variables[place.name]


def _fold_text(text: str) -> str:
    return " ".join(text.casefold().split())
