#!/usr/bin/env bash
# Compile the stress programs of the engine, of tables and of blocks by key under AddressSanitizer (with UndefinedBehaviorSanitizer) and under ThreadSanitizer, and run them.
# usage: run_sanitizers.sh [DIRECTORY for its files; default: a temporary one beside the sources]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d "${1:-$root}/.sanitizers.XXXXXX")
trap 'rm -rf "$work"' EXIT

flags=(-std=c++20 -O1 -g -fno-omit-frame-pointer -pthread -ffp-contract=off -Wall -Wextra "-I$root/csrc" "-I$root/tests/native")

for sanitizer in address,undefined thread; do
    echo "== $sanitizer"
    mkdir -p "$work/$sanitizer"
    printf '%s\0' "$root"/csrc/core/*.cpp "$root"/csrc/engine/*.cpp "$root"/csrc/checkpoint/*.cpp "$root"/csrc/quantization/*.cpp "$root/tests/native/stress.cpp" |
        (cd "$work/$sanitizer" && xargs -0 -P "$(nproc)" -I{} "${CXX:-c++}" "${flags[@]}" "-fsanitize=$sanitizer" -fno-sanitize-recover=all -c {})
    # Linked, so that it is there when the engine opens libcuda.
    driver="$work/$sanitizer/libcuda.so.1"
    "${CXX:-c++}" "${flags[@]}" "-fsanitize=$sanitizer" -shared -fPIC -Wl,-soname,libcuda.so.1 "$root/tests/device/stand_in_cuda.cpp" -o "$driver"
    "${CXX:-c++}" "-fsanitize=$sanitizer" -pthread "$work/$sanitizer"/*.o "$driver" -Xlinker -rpath -Xlinker "$work/$sanitizer" -ldl \
        -o "$work/$sanitizer/stress"
    "${CXX:-c++}" "${flags[@]}" "-fsanitize=$sanitizer" -fno-sanitize-recover=all "$root"/csrc/tables/*.cpp "$root/tests/native/table_stress.cpp" \
        -o "$work/$sanitizer/table_stress"
    "${CXX:-c++}" "${flags[@]}" "-fsanitize=$sanitizer" -fno-sanitize-recover=all "$root"/csrc/kvstore/*.cpp "$root/tests/native/kv_stress.cpp" \
        $(ls "$work/$sanitizer"/*.o | grep -v /stress.o) "$driver" -Xlinker -rpath -Xlinker "$work/$sanitizer" -ldl -o "$work/$sanitizer/kv_stress"
    TSAN_OPTIONS="halt_on_error=1" ASAN_OPTIONS="detect_leaks=1" "$work/$sanitizer/table_stress"
    TSAN_OPTIONS="halt_on_error=1" ASAN_OPTIONS="detect_leaks=1" "$work/$sanitizer/kv_stress" "$work"
    TSAN_OPTIONS="halt_on_error=1" ASAN_OPTIONS="detect_leaks=1" "$work/$sanitizer/stress" "$work"
done
