"""io_uring's system calls, answered in the kernel's place by a library to preload, whose part that answers is the test's."""

from __future__ import annotations

import subprocess
from pathlib import Path

_INTERPOSED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
enum { SETUP = 425, ENTER = 426, REGISTER = 427 };
enum { FLAGS = 2, FEATURES = 5 };        /* of the numbers in the second argument of SETUP */
enum { PROBE = 8, REGISTER_RINGS = 20 }; /* second argument of REGISTER */
enum { ONE_MAPPING = 1 };                /* of FEATURES */

static inline long refuse(int error) {
    errno = error;
    return -1;
}
static long ask(long number, const long *a) {
    static long (*kernel)(long, ...);
    if (!kernel) kernel = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return kernel(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
static long answer(long number, long *a);

long syscall(long number, ...) {
    long a[6];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; ++i) a[i] = va_arg(arguments, long);
    va_end(arguments);
    return number >= SETUP && number <= REGISTER ? answer(number, a) : ask(number, a);
}
"""


def answering(answer: str, directory: Path) -> Path:
    """Compile a library that answers io_uring's system calls of whatever preloads it.

    Args:
        answer: C that defines ``static long answer(long number, long *a)``. It gets the number (SETUP, ENTER or REGISTER) and the
            arguments, and returns ``ask(number, a)``, what the kernel says, or ``refuse(EINVAL)``.
        directory: Where the library is put.
    """
    source, library = directory / "answering.c", directory / "answering.so"
    source.write_text(_INTERPOSED + answer)
    subprocess.run(["cc", "-Wall", "-Werror", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    return library
