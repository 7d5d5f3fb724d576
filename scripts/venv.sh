#!/bin/sh
# Creates the virtual environment from the hash-pinned requirements. Needs Python 3.11 or newer and nothing else.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "Bursar needs Python 3.11 or newer: $PYTHON is $("$PYTHON" --version 2>&1 || echo missing)." >&2
    echo "Name another one with: make PYTHON=/path/to/python3 $*" >&2
    exit 1
}
if [ ! -x "$VENV/bin/pip" ] && ! "$PYTHON" -m venv --clear "$VENV" 2>/dev/null; then
    # Debian ships venv's pip apart.
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null
        "$PYTHON" -m venv --clear "$VENV"
    else
        echo "Python's venv module has no pip here. As root: apt-get install python3-venv" >&2
        exit 1
    fi
fi
echo "Setting up $VENV …"
"$VENV/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r requirements/bootstrap.txt 2>/dev/null ||
    "$VENV/bin/pip" install --disable-pip-version-check --require-hashes -r requirements/bootstrap.txt
export VIRTUAL_ENV="$here/$VENV"
# Compiled now: the command line would otherwise pay for it at every start where caches may not be written.
"$VENV/bin/uv" pip sync --quiet --compile-bytecode --require-hashes requirements/bootstrap.txt requirements/dev.txt
"$VENV/bin/uv" pip install --quiet --no-deps --no-build-isolation --editable .
"$VENV/bin/python" -m compileall -q src
