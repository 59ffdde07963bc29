#!/usr/bin/env bash
# Runs the kernel's tests under the address and undefined-behaviour sanitizers, and native/check/race.cpp under the
# thread sanitizer. Further arguments go to pytest. Needs gcc with its sanitizer libraries.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
out=build/sanitize
rm -rf "$out/src"
mkdir -p "$out/src"
cp -r src/clearhead "$out/src/"
rm -f "$out"/src/clearhead/attention/impl/native/_native*.so

cmake -S . -B "$out/cmake" -G Ninja -DPython_EXECUTABLE="$(realpath -s "$(command -v "$python")")" \
  -DCMAKE_BUILD_TYPE=Debug -DCLEARHEAD_OPTIMIZE=-O1 \
  -DCMAKE_CXX_FLAGS="-g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer" >/dev/null
cmake --build "$out/cmake"
cmake --install "$out/cmake" --prefix "$out/src" >/dev/null
echo "== address and undefined behaviour"
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=2 PYTHONPATH="$out/src" \
  "$python" - "$out/src" -q -p no:cacheprovider tests/test_native.py tests/test_native_gradients.py \
  -k "not variable and not lacks_is and not ulp and not compiled" "$@" <<'END'
import sys
from pathlib import Path
where, *asked = sys.argv[1:]
# An editable install would be found before PYTHONPATH.
sys.meta_path = [x for x in sys.meta_path if type(x).__name__ != "ScikitBuildRedirectingFinder"]
import pytest
failed = pytest.main(asked)
from clearhead.attention.impl.native import _native
assert Path(where).resolve() in Path(_native.__file__).resolve().parents, _native.__file__
sys.exit(failed)
END

echo "== threads"
sources=(native/check/race.cpp native/host/dispatch.cpp)
# What gcc 12 calls at the entry and exit of a function does not keep all registers of AVX-512: results change, as they
# do in no other build.
flags=(-std=c++17 -Inative -O1 -g -fsanitize=thread --param tsan-instrument-func-entry-exit=0)
flags+=(-DCLEARHEAD_STD_THREADS -ffp-contract=off)
objects=()
isas=(baseline)
case $(uname -m) in
  x86_64) isas+=(avx2 avx512 avx512_bf16) flags+=(-DCLEARHEAD_X86) ;;
  aarch64 | arm64) isas+=(neon neon_bf16) flags+=(-DCLEARHEAD_ARM) ;;
esac
for isa in "${isas[@]}"; do
  case $isa in
    avx2) extra=(-mavx2 -mfma -mf16c) ;;
    avx512*) extra=(-mavx2 -mfma -mf16c -mavx512f -mavx512dq -mavx512bw -mavx512vl) ;;
    neon_bf16) extra=(-march=armv8.2-a+bf16) ;;
    *) extra=() ;;
  esac
  [ $isa = avx512_bf16 ] && extra+=(-mavx512bf16)
  g++ "${flags[@]}" "${extra[@]}" -c native/isa/$isa.cpp -o "$out/$isa.o"
  objects+=("$out/$isa.o")
done
g++ "${flags[@]}" "${sources[@]}" "${objects[@]}" -pthread -o "$out/race"
"$out/race"
