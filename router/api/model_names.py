"""Names of models and their aliases, for clients with fixed names."""

from collections.abc import Mapping
from typing import Final

from router.fleet.fleet import Fleet
from router.turns.model_check import ModelCheck

ANY: Final = "*"  # at an alias's end: any suffix


class ModelNames:
    """Aliases of models, from configuration."""

    def __init__(self, fleet: Fleet, aliases: Mapping[str, str]) -> None:
        self._fleet = fleet
        self._models = ModelCheck(fleet)
        self._exact = {name: model for name, model in aliases.items() if not name.endswith(ANY)}
        prefixes = [(name[:-1], model) for name, model in aliases.items() if name.endswith(ANY)]
        self._prefixes = sorted(prefixes, key=lambda pair: len(pair[0]), reverse=True)

    @property
    def listed(self) -> list[str]:
        """The aliases without a wildcard."""
        return sorted(self._exact)

    async def resolve(self, name: str) -> str:
        """Return the model of a name or alias; the longest matching prefix wins."""
        if name in self._exact:
            return self._exact[name]
        matching = (model for prefix, model in self._prefixes if name.startswith(prefix))
        model = next(matching, None)
        if model is None or name in self._fleet.models():
            return name
        # A node that has not joined yet may serve a model of exactly this name.
        return name if name in await self._models.names() else model
