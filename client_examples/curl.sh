#!/bin/sh
# Asks by curl: a stream of server-sent events, then one answer.
# sh curl.sh http://localhost:8000 "In the beginning"
set -eu
URL=${1:-http://localhost:8000}
PROMPT=${2:-In the beginning}  # goes into JSON as it is: no quotes or backslashes

curl --fail-with-body -sSN "$URL/v2/models/grok1_generate/generate_stream" \
  -d "{\"text_input\": \"$PROMPT\", \"max_tokens\": 16}"

curl --fail-with-body -sS "$URL/v2/models/grok1_complete/generate" \
  -d "{\"text_input\": \"$PROMPT\", \"max_tokens\": 16, \"temperature\": 0}"
echo
