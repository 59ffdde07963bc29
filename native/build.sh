#!/usr/bin/env bash
# Builds the kernel in place: src/clearhead/attention/impl/native/_native*.so. Further arguments go to cmake.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
cmake -S . -B build/native -G Ninja -DPython_EXECUTABLE="$(realpath -s "$(command -v "$python")")" "$@" >build-native.log 2>&1 || {
  cat build-native.log
  exit 1
}
rm -f build-native.log
cmake --build build/native
cmake --install build/native --prefix src >/dev/null

# An editable install of this checkout has a copy of its own, and Python looks there first.
"$python" - "$PWD/src/clearhead" <<'END'
import shutil, sys
from pathlib import Path
try:
    import clearhead
    from clearhead.attention.impl.native import _native
except ImportError:
    sys.exit()
here = Path(sys.argv[1]).resolve()
built = here / "attention/impl/native" / Path(_native.__file__).name
if Path(clearhead.__file__).resolve().parent == here and not built.samefile(_native.__file__):
    part = Path(_native.__file__ + ".part")
    shutil.copy(built, part)
    part.replace(_native.__file__)
END
