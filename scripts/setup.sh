#!/usr/bin/env bash
# Make the virtual environment that the Makefile uses, or bring an existing one up to date.
#
#     scripts/setup.sh VENV EXTRAS         for example: scripts/setup.sh .venv lab,test
#
# Installs mkref itself in editable mode with the extras, at the versions of requirements.lock.
# PYTHON names the interpreter of a new environment; PIP_ARGS is handed to pip (for example an index of your own).
# It asks nothing, changes nothing outside VENV (but see python3-venv below), and can be run again at any time.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
extras=$2

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  local name
  for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
    if command -v "$name" >/dev/null && new_enough "$name"; then
      echo "$name"
      return
    fi
  done
  fail "no Python 3.11 or newer (tried: ${PYTHON:-python3, python3.11 to python3.14}); PYTHON=/path/to/python names another"
}

make_venv() {
  local python version
  python=$(find_python)
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  # Debian keeps venv's ensurepip in a package of its own.
  if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    say "Python $version has no venv module; trying to install python$version-venv"
    scripts/apt.sh "python$version-venv" ||
      fail "install it and try again: sudo apt-get install python$version-venv"
  fi
  say "new environment $venv with Python $version"
  "$python" -m venv --clear "$venv"
}

if [ ! -x "$venv/bin/python" ] || ! new_enough "$venv/bin/python"; then
  make_venv
fi
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null

# On a terminal pip shows its progress; in a log one line is enough.
quiet=-qq
[ -t 1 ] && quiet=
# shellcheck disable=SC2086  # PIP_ARGS is a list of words
pip_install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check $quiet ${PIP_ARGS:-} -c requirements.lock "$@"
}

say "installing mkref[$extras] at the versions of requirements.lock (the first time: a minute or more)"
# mkref's own build tools come from the lock too, so that nothing is fetched unpinned.
pip_install hatchling editables
pip_install --no-build-isolation -e ".[$extras]"

# JupyterLab asks for news at its first start: no, for this environment only.
case ",$extras," in
  *,lab,*)
    settings=$venv/share/jupyter/lab/settings
    mkdir -p "$settings"
    printf '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}\n' >"$settings/overrides.json"
    ;;
esac

command -v "${CXX:-c++}" >/dev/null ||
  say "no C++ compiler: the kernel will not run on this CPU (Debian, Ubuntu: sudo apt-get install g++)"
say "ready: $venv"
