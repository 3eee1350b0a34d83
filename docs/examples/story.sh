#!/usr/bin/env bash
# The whole story on this machine, in about a minute: record -> validate -> promote -> serve -> breach -> rollback.
#
#   bash docs/examples/story.sh [FOLDER]        MODEL=smollm2 for a real model; PORT=8000
#
# A pool this small would never be used; it makes a handful of requests feel what thousands do to a large one.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-runs/story} model=${MODEL:-dummy:tiny} port=${PORT:-8000}
url=http://127.0.0.1:$port
pool=(--kv-blocks 16 --block-size 16)
card=(--gpu l40s --target-model smollm2-135m) # what this server is to the registry: evidence is for a model on a card
candidate=constrained:tokens=48,window=8
mkdir -p "$out"
export ZLAB_REGISTRY=$out/registry.db
ZLAB_ADMIN_KEY=${ZLAB_ADMIN_KEY:-$(python3 -c 'import secrets; print(secrets.token_hex())')}
export ZLAB_ADMIN_KEY

say() { printf '\n== %s\n' "$*"; }

serve() { # start a server in the background and wait until it is well
  zlab serve --model "$model" --port "$port" "${pool[@]}" "$@" >>"$out/server.log" 2>&1 &
  server=$!
  trap 'kill -TERM $server 2>/dev/null || true' EXIT
  until python3 -c "import urllib.request as r; r.urlopen('$url/health')" 2>/dev/null; do
    kill -0 $server 2>/dev/null || { tail -5 "$out/server.log" >&2 && exit 1; }
    sleep 0.2
  done
}

stop() { # drain: the first SIGTERM lets what runs finish
  kill -TERM $server
  wait $server
  trap - EXIT
}

rollbacks() { # how often the watch has rolled back, earlier runs in this folder included
  zlab history --gpu l40s --model smollm2-135m --json | { grep -o '"who": *"watch"' || true; } | wc -l
}

say "1. record: a day's traffic under full-kv; lengths, times and salted prefixes, no text"
ZLAB_REGISTRY='' serve --policy full-kv --record "$out/live"
python3 "$here/traffic.py" "$url"
stop
trace=$(ls "$out"/live/*/trace-00000.jsonl | tail -1)

say "2. validate: would bounded requests do as well on this very traffic, and preempt nobody?"
zlab validate $candidate --against full-kv --trace "$trace" --gates "$here/story-gates.toml" \
  --gpu l40s --model smollm2-135m "${pool[@]}" --why "bounded requests need not give way"

say "3. promote: without the evidence this would be refused"
zlab promote full-kv --to live --gpu l40s --model smollm2-135m --force --why "what ran before there was a registry"
zlab promote $candidate --to live --gpu l40s --model smollm2-135m --why "evidence of today's traffic"

say "4. serve what the registry has live, and watch it"
serve "${card[@]}" --gates "$here/story-watch.toml" --watch-min-requests 4 --record "$out/watched"
python3 "$here/traffic.py" "$url" --seed 1

before=$(rollbacks)
say "5. somebody puts full-kv back, past the evidence, while the server runs ..."
zlab promote full-kv --to live --gpu l40s --model smollm2-135m --force --why "a hunch" --live "$url"
python3 "$here/traffic.py" "$url" --seed 2 --requests 16

say "6. ... the gate breaks, the watch rolls back, no request is lost, and the history says why"
for _ in $(seq 150); do # the registry's note follows the rollback itself
  [ "$(rollbacks)" -gt "$before" ] && break
  sleep 0.2
done
stop
COLUMNS=${COLUMNS:-150} zlab history --gpu l40s --model smollm2-135m
