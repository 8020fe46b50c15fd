# Sourced by the scripts that set everything up: a virtual environment in .venv with this package and what it needs.
#   PYTHON=python3.12   which Python (3.10 to 3.12) to make it with
#   VENV=.venv          where
# On x86-64 Linux PyPI's torch is the CUDA build. To save the download on a machine without a GPU, point pip at
# PyTorch's CPU wheels first (PIP_EXTRA_INDEX_URL).

VENV=${VENV:-.venv}

_find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.12 python3.10 python3; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "no Python 3.10 to 3.12 found: install one, or set PYTHON to it" >&2
  return 1
}

# usage: ensure_venv EXTRAS
ensure_venv() {
  local extras=$1 stamp python
  stamp="$VENV/.made-with-$(cat setup.py verl_bpo/__init__.py | cksum | cut -d' ' -f1)-${extras//,/-}"
  if [ ! -e "$stamp" ]; then
    python=$(_find_python) || return 1
    echo "setting up $VENV with $("$python" --version) and extras [$extras]; this takes a few minutes once"
    [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --upgrade pip 2>&1 | grep -v '^WARNING' || true
    # torch first: a later resolution then keeps this build.
    "$VENV/bin/python" -m pip install --quiet "torch==2.13.0" 2>&1 | grep -v '^WARNING' || true
    "$VENV/bin/python" -m pip install --quiet -e ".[$extras]" 2>"$VENV/pip.log" || { cat "$VENV/pip.log" >&2; return 1; }
    touch "$stamp"
  fi
  export PATH="$PWD/$VENV/bin:$PATH"
}
