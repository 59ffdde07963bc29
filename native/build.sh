#!/usr/bin/env bash
# Builds the kernel in place: src/clearhead/_impl/_native*.so. Further arguments go to cmake.
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
