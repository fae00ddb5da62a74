#!/usr/bin/env bash
# What `make test` uses beside Python packages: installed where that is possible without asking, else one
# line says what is checked less. It never fails.
#
#     scripts/system_extras.sh
set -uo pipefail
cd "$(dirname "$0")/.."

have_clang() {
  # ThreadSanitizer needs its run-time library too, a package of its own: try, do not guess.
  local compiler
  for compiler in clang++ clang++-{21,20,19,18,17,16,15,14}; do
    command -v "$compiler" >/dev/null || continue
    echo 'int main() { return 0; }' |
      "$compiler" -fsanitize=thread -x c++ - -o /dev/null >/dev/null 2>&1 && return 0
  done
  return 1
}

have_chromium() { command -v chromium >/dev/null || command -v chromium-browser >/dev/null; }

have_clang ||
  scripts/apt.sh clang-19 libclang-rt-19-dev llvm-19 ||
  scripts/apt.sh clang-18 libclang-rt-18-dev llvm-18 ||
  scripts/apt.sh clang llvm
have_clang ||
  echo "test: no clang with ThreadSanitizer and no way to install it here: races are looked for with g++, or not at all"

have_chromium || scripts/apt.sh chromium fonts-dejavu-core
have_chromium ||
  echo "test: no Chromium and no way to install it here: notebooks are run, but not looked at in a browser"
exit 0
