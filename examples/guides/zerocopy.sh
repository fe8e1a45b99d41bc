#!/bin/bash
# Runs the guide "Send large messages without copying": a file of 8 MiB over loopback.
set -eu
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
head -c 8388608 /dev/urandom >"$work/big.bin"
touch "$work/log"
towpath recv --listen 127.0.0.1:0 --out "$work/copy.bin" >"$work/log" 2>&1 &
# The first line of the log contains the address.
until address=$(grep -o -m 1 '127.0.0.1:[1-9][0-9]*' "$work/log"); do sleep 0.1; done
towpath send "$work/big.bin" --to "$address" >/dev/null
wait
cmp "$work/big.bin" "$work/copy.bin" && echo "the files are equal"
