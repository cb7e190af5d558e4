"""The router: HTTP APIs for clients, placement in seconds, the directory, moves, the CLI.

Imports `fabric`, never `node`: nodes are reached by name. Ray enters through
`router.fleet.ray_control` and `router.supervise.ray_config` only.
"""
