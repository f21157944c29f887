#!/bin/bash
# Written by constellation. It succeeds if haproxy of this machine answers; with `ready`, if it also reaches an API server.
exec 3<>/dev/tcp/{{.Monitor}}/{{.Port}} || exit 1
printf 'GET / HTTP/1.0\r\n\r\n' >&3 && read -r -t 1 _ code _ <&3 || exit 1
[ "$1" != ready ] || [ "$code" = 200 ]
