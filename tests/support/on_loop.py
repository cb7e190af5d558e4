"""Change a node's state on its event loop, the only place where that is allowed."""

import asyncio


def change(service, target, **values):
    """Set attributes of an object, such as an agent, on a running node's loop."""

    async def set_all():
        for name, value in values.items():
            setattr(target, name, value)

    asyncio.run_coroutine_threadsafe(set_all(), service._loop).result(60)
