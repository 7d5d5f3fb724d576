#!/bin/sh
# Pins every dependency with its hashes. The registry's address is deliberately not written.
set -eu
cd "$(dirname "$0")/.."
compile() {
    .venv/bin/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header --python-version 3.11 "$@"
}
echo uv | compile - --output-file requirements/bootstrap.txt
compile pyproject.toml --extra embedded --output-file requirements/runtime.txt
compile pyproject.toml --extra embedded --extra waldur --group dev --constraint requirements/runtime.txt --output-file requirements/dev.txt
# ColdFront has an environment of its own: it needs other versions, and its licence is another one.
printf 'coldfront>=1.1.10,<1.2\npytest\n' | compile - pyproject.toml --constraint requirements/dev.txt --output-file requirements/coldfront.txt
# What reads from Waldur is pinned to what was tested.
compile pyproject.toml --extra embedded --extra waldur --constraint requirements/dev.txt --output-file requirements/waldur.txt
