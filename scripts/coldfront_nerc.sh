#!/bin/sh
# Runs the functional OpenShift tests of nerc's coldfront-plugin-cloud, unmodified, against a served Bursar.
#
# COLDFRONT_PLUGIN_CLOUD is a checkout of the plugin; nothing of it is copied here. Its tests need Python 3.11 to 3.13:
# name one with PYTHON. Extra arguments are the tests to run; default: all of them.
set -eu
: "${COLDFRONT_PLUGIN_CLOUD:?is the path of a checkout of nerc-project/coldfront-plugin-cloud}"
: "${PYTHON:=python3}" "${VENV:=.venv}"
here=$(cd "$(dirname "$0")/.." && pwd)
plugin=$(cd "$COLDFRONT_PLUGIN_CLOUD" && pwd)
folder=${COLDFRONT_NERC_FOLDER:-$here/.coldfront-nerc}
bursar=$here/$VENV/bin/bursar
mkdir -p "$folder"

"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
    echo "The plugin needs Python 3.11 to 3.13: name one with PYTHON=/path/to/python3.12" >&2
    exit 1
}
if [ ! -e "$folder/venv/.installed" ]; then
    echo "Setting up $folder/venv …"
    "$PYTHON" -m venv --clear "$folder/venv"
    # Without nerc_rates, which is not on PyPI: only the plugin's commands for billing import it.
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check coldfront==1.1.10 openshift 'kubernetes<36' \
        'pandas>=3,<4' pyarrow pydantic boto3 pytz 'requests<3' 'simplejson<4' \
        python-cinderclient python-keystoneclient python-neutronclient python-novaclient python-swiftclient
    touch "$folder/venv/.installed"
fi

rm -rf "$folder/data" "$folder/admin-token" "$folder/serve.log"
"$bursar" serve --data "$folder/data" --http 127.0.0.1:0 --admin-token-file "$folder/admin-token" \
    --user "$(id -un)" >"$folder/serve.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT INT TERM
url=
while [ -z "$url" ]; do
    kill -0 $server 2>/dev/null || { cat "$folder/serve.log" >&2; exit 1; }
    sleep 0.5
    url=$(sed -n 's/^bursar is ready on \(http:[^,]*\),.*/\1/p' "$folder/serve.log")
done

# A portal's tenant, and a token that reaches nothing but the tenants below it.
token=$("$here/$VENV/bin/python" - "$url" "$folder/admin-token" <<'PYTHON'
import sys
from pathlib import Path

from bursar.client import Client

with Client(sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8").strip()) as client:
    client.tenants.create({"metadata": {"name": "coldfront"}, "spec": {}})
    wanted = {"role": "service", "user": "coldfront", "tenants": ["coldfront"]}
    print(client.request("POST", "/api/v1/tokens", body=wanted)["status"]["token"])
PYTHON
)

cd "$plugin/src"
status=0
PYTHONDONTWRITEBYTECODE=1 DJANGO_SETTINGS_MODULE=local_settings FUNCTIONAL_TESTS=True OS_API_URL="$url" \
    OPENSHIFT_MICROSHIFT_TOKEN="$token" OPENSHIFT_MICROSHIFT_VERIFY=false \
    "$folder/venv/bin/python" -m django test "${@:-coldfront_plugin_cloud.tests.functional.openshift}" \
    >"$folder/tests.log" 2>&1 || status=$?
tail -n 5 "$folder/tests.log"
exit $status
