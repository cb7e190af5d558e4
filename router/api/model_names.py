"""Which model a client means: programs with fixed names of models are served by what there is."""

from collections.abc import Mapping
from typing import Final

from router.fleet.fleet import Fleet
from router.turns.model_check import ModelCheck

ANY: Final = "*"  # at an alias's end: whatever follows


class ModelNames:
    """Aliases of models, from configuration."""

    def __init__(self, fleet: Fleet, aliases: Mapping[str, str]) -> None:
        self._fleet = fleet
        self._models = ModelCheck(fleet)
        self._exact = {name: model for name, model in aliases.items() if not name.endswith(ANY)}
        begun = [(name[:-1], model) for name, model in aliases.items() if name.endswith(ANY)]
        self._begun = sorted(begun, key=lambda each: len(each[0]), reverse=True)

    @property
    def listed(self) -> list[str]:
        """The aliases that are names."""
        return sorted(self._exact)

    async def resolve(self, name: str) -> str:
        """Return the model that a name stands for; of two beginnings that fit, the longer's."""
        if name in self._exact:
            return self._exact[name]
        found = (model for begin, model in self._begun if name.startswith(begin))
        model = next(found, None)
        if model is None or name in self._fleet.models():
            return name
        # A node that is still to come may serve what bears the very name.
        return name if name in await self._models.names() else model
