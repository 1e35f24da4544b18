#!/usr/bin/env bash
# bash 5.2.15: if a trapped signal ends `wait` as the awaited child ends, its exit code is lost.
#
# Job scripts start a launcher in the background, trap the scheduler's signal, and wait again.
#
# Guess: `wait PID` returns above 128 because of the trap, and the next `wait PID` returns the
# child's code, 75.
# Behavior: in some percent of the cases in which the child ends right after the signal, the next
# `wait` returns -1, and so does every later one. A script that ends with it exits with 255.
# Output seen on 2026-11-28, Debian 12, 2 cores:
#   300 children: 75 after 291, -1 after 9
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
(cd "$directory" && apt-get download -q bash=5.2.15-2+b13 && dpkg -x bash_*.deb .)
cat > "$directory/job.sh" <<'END'
trap 'interrupted=yes' USR1
"$BASH" -c 'kill -USR1 "$PPID"; exit 75' &
child=$!
while :; do
    interrupted='' code=0
    wait "$child" || code=$?
    [ -n "$interrupted" ] || break
done
echo "$code"
END
for _ in $(seq 300); do
    "$directory/bin/bash" "$directory/job.sh"
done > "$directory/codes"
kept=$(grep -cx 75 "$directory/codes" || true)
lost=$(grep -cx -- -1 "$directory/codes" || true)
echo "300 children: 75 after $kept, -1 after $lost"
[ "$lost" -gt 0 ]
