#!/bin/sh
# Writes the King James Bible (public domain) as plain text, one verse a line and a blank line between
# chapters, from Debian's packages bible-kjv and bible-kjv-text. Needs apt-get and dpkg, not root.
#   benchmarks/kjv_text.sh OUTPUT.txt
set -eu
out=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
apt-get download -q bible-kjv bible-kjv-text
for deb in ./*.deb; do dpkg -x "$deb" .; done
# "Ge1:1 In the beginning" -> text only; a new chapter begins with a blank line.
usr/bin/bible -f -p "$work/usr/lib/" gen1:1-rev22:21 |
    sed -n 's/^[0-9]*[A-Za-z]*\([0-9]*\):\([0-9]*\) \(.*\)$/\1 \2 \3/p' |
    awk '{ verse = $2; $1 = ""; $2 = ""; sub(/^ +/, ""); if (verse == 1 && NR > 1) print ""; print }' > "$out"
wc "$out"
