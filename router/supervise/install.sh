#!/bin/bash
# Install the synced code on this Mac. `ray up` runs it when the cluster file or the code changed.
set -eu
# Ray runs bash, which does not know the PATH of your zsh.
export PATH="$HOME/.local/bin:/opt/homebrew/bin:/usr/local/bin:$PATH"

cd ~/macfabric
chmod 700 . keys
chmod 600 keys/*

# Every Mac must have the same minor version of Python.
if ! venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
    rm -rf venv
    if command -v uv >/dev/null; then
        uv venv --quiet --python 3.12 ~/macfabric/venv
    else
        python3.12 -m venv ~/macfabric/venv
    fi
fi

cd app
rm -rf build macfabric.egg-info
if command -v uv >/dev/null; then
    uv pip install --quiet --python ~/macfabric/venv/bin/python -c constraints.txt \
        --reinstall-package macfabric .
else
    ~/macfabric/venv/bin/python -m pip install --quiet -c constraints.txt .
fi
