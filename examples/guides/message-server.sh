#!/bin/bash
# Runs the guide "A message server with worker processes": a front with four workers, and a client with two lines.
set -eu
log=$(mktemp)
towpath mux 127.0.0.1:0 --framing line --workers 4 --order replies --worker worker 2>"$log" &
front=$!
trap 'kill $front; wait $front; rm "$log"' EXIT
# The first line of the log ends with the address.
until port=$(sed -n '1s/.*://p' "$log") && [ -n "$port" ]; do sleep 0.1; done

exec 3<>"/dev/tcp/127.0.0.1/$port"
printf 'hello\nworld\n' >&3
head -2 <&3
