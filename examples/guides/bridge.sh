#!/bin/sh
# Runs the guide "An inline IPS on a bridge" between two network namespaces.
. "$(dirname "$0")/netns.sh"
host client 10.0.0.1/24
host server 10.0.0.2/24
start bridge

on server '
import http.server
http.server.HTTPServer(("10.0.0.2", 80), http.server.SimpleHTTPRequestHandler).serve_forever()' 2>/dev/null &
sleep 1

get='
import sys, urllib.request
def get(path):
    try:
        return urllib.request.urlopen("http://10.0.0.2" + path, timeout=2).status
    except OSError as error:
        return "blocked"
'
echo "GET /: $(on client "$get"'print(get("/"))')"
echo "GET /?q=union+select: $(on client "$get"'print(get("/?q=union+select"))')"
echo "GET /etc/passwd: $(on client "$get"'print(get("/etc/passwd"))')"
towpath ctl show rules
