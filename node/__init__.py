"""Software of one Mac: the engine, its scheduler, the hot pool, the SSD tier, the data plane.

Imports `fabric`, never `router`. MLX enters through `node.mlx`, Ray through `node.ray_actor` and
`node.launch`, files through `node.store.posix_disk`.
"""
