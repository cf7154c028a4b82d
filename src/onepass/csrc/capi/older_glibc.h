// older_glibc.h: included before every file, so that a build runs with glibc 2.28 (manylinux_2_28), wherever it was
// made. A newer glibc has newer versions of these functions. They differ only in their errors, or are in another
// library file.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__)
#define ONEPASS_OLDER(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5");
ONEPASS_OLDER(exp)
ONEPASS_OLDER(log)
ONEPASS_OLDER(log2)
ONEPASS_OLDER(pow)
ONEPASS_OLDER(dladdr)
ONEPASS_OLDER(dlopen)
ONEPASS_OLDER(dlsym)
ONEPASS_OLDER(pthread_once)
ONEPASS_OLDER(pthread_rwlock_rdlock)
ONEPASS_OLDER(pthread_rwlock_unlock)
ONEPASS_OLDER(pthread_rwlock_wrlock)
#undef ONEPASS_OLDER
#endif
