"""The recipes of docs/frameworks.md, run unchanged: a later process finds each agent warm."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.installed import python_of
from tests.clients.programs import HERE, run_program
from tests.support.local_fabric import local_fabric

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
WARM_MIN = 0.8  # of a prompt
LAMPS = [
    f"The lamp of pier {pier} shines {colour} every {pier + 3} seconds."
    for pier, colour in enumerate(["red", "green", "white", "amber", "blue"] * 6, 11)
]
QUESTIONS = {
    "The lamp of pier 13 shines": "white every 16 seconds",
    "The lamp of pier 22 shines": "green every 25 seconds",
    "The lamp of pier 39 shines": "amber every 42 seconds",
}
CUED = "ask at pier nine"
PRINTED_ANSWER = re.compile(
    r"^(\w+): (.*?) \((\d+) of (\d+) tokens remembered\)$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Recipe:
    """A framework's recipe; whether its agents' prompts only grow, and their end."""

    group: str
    name: str
    grows: bool = True
    cue: str = ""  # the end of each prompt, if it is not the question

    @property
    def file(self):
        return HERE / "recipes" / f"{self.name}_crew.py"

    def __str__(self):
        return self.name


RECIPES = [
    Recipe("langchain", "langgraph"),
    Recipe("agent-framework", "agent_framework"),
    Recipe("crewai", "crewai", grows=False, cue="Provide your complete response:"),
]


@dataclass(frozen=True)
class AgentAnswer:
    """A recipe's report of one agent."""

    text: str
    cached_tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class Crew:
    """A user's copy of a recipe, with its crew on the fabric."""

    fabric: object
    recipe: Recipe
    folder: Path

    def run(self, question):
        """Run the recipe in its own process; return each agent's answer."""
        document = self.folder / "document.txt"
        facts = [f"The harbour of {self.recipe}.", *LAMPS]
        facts += [f"{self.recipe.cue} {CUED}."] if self.recipe.cue else []
        document.write_text("\n".join(facts))
        command = [python_of(self.recipe.group), self.recipe.file, self.recipe, document, question]
        more = {"FABRIC": self.fabric.url, "CREWAI_DISABLE_TELEMETRY": "true"}
        done = run_program([str(part) for part in command], "", "", self.folder, **more)
        found = {
            name: AgentAnswer(text, int(cached), int(prompt))
            for name, text, cached, prompt in PRINTED_ANSWER.findall(done.printed)
        }
        assert set(found) == {"author", "critic"}, done.printed[-3_000:]
        return found

    def run_right(self, question):
        """Run the recipe, and check its answers, and its reported tokens against the fabric's."""
        spoken = self.run(question)
        for name, answer in spoken.items():
            assert (CUED if self.recipe.cue else QUESTIONS[question]) in answer.text
            match = self.agent(name)["last_match"]
            assert match["cached_tokens"] == answer.cached_tokens
            assert match["prompt_tokens"] == answer.prompt_tokens
        return spoken

    def run_warm(self, question):
        """Run the recipe, and check that no agent recomputes its cache."""
        tokens_before = {name: self.agent(name)["tokens"] for name in ("author", "critic")}
        for name, answer in self.run_right(question).items():
            assert answer.cached_tokens > WARM_MIN * answer.prompt_tokens
            if self.recipe.grows:
                assert answer.cached_tokens == tokens_before[name]

    def agent(self, name):
        """Return the fabric's row of one agent of the crew."""
        response = self.fabric.http.get(f"/v1/agents/{self.recipe}.{name}")
        assert response.status_code == 200, response.text
        return response.json()


def agents_of(fabric):
    return {each["id"] for each in fabric.http.get("/v1/agents").json()["data"]}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    with local_fabric(folder, "recall", "left", "right", tokens_max=48) as instance:
        yield instance


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_crew_agents_remember_across_processes_and_nodes(fabric, tmp_path, recipe):
    crew, earlier_agents = Crew(fabric, recipe, tmp_path), agents_of(fabric)
    first, second, third = QUESTIONS
    crew.run_right(first)
    assert agents_of(fabric) - earlier_agents == {f"{recipe}.author", f"{recipe}.critic"}
    crew.run_warm(second)
    author = crew.agent("author")
    to = {"left": "right", "right": "left"}[author["owner"]]
    fabric.migrate(author["id"], to)
    crew.run_warm(third)
    assert crew.agent("author")["owner"] == to
    assert agents_of(fabric) - earlier_agents == {f"{recipe}.author", f"{recipe}.critic"}


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_page_shows_the_recipes_as_run(recipe):
    assert f"```python\n{recipe.file.read_text()}```" in PAGE.read_text()
