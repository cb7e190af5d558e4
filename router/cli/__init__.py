"""The `macfabric` command; `router.cli.main:main` is its entry point."""
