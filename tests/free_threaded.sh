#!/usr/bin/env bash
# Build a Python without the interpreter lock into a folder, from the source package of Debian 13: ten minutes at most.
# Needs Debian, a C compiler, and what any build of Python needs (apt-get build-dep python3).
set -euo pipefail
target=$(realpath -m "${1:?usage: tests/free_threaded.sh FOLDER}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
# The sources of this machine, but for release and kind; the lists of packages of this machine stay as they are.
mkdir -p lists/partial
sed -E 's/^Types:.*/Types: deb-src/; s/^Suites:.*/Suites: trixie/; /^$/q' /etc/apt/sources.list.d/debian.sources > trixie.sources
apt=(apt-get -qq -o "Dir::Etc::sourcelist=$work/trixie.sources" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/lists")
"${apt[@]}" update
# Without the changes of Debian, whose site.py does not find the packages of an environment of such a Python.
"${apt[@]}" source --download-only python3.13
tar -xf python3.13_*.orig.tar.xz
cd Python-3.13*/
./configure -q --disable-gil --prefix="$target"
make -s -j"$(nproc)"
make -s install
"$target/bin/python3.13t" -c 'import sys; print(sys.version, "lock:", sys._is_gil_enabled())'
