// older_libstdcxx.cpp: what headers of today's libstdc++ call and that of manylinux_2_28 (GCC 8) lacks, so that a build
// runs there wherever it is made.
#include <new>
#include <sstream>

// Only says whether atomics could be plain; no.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

namespace std {

void __throw_bad_array_new_length() { throw bad_array_new_length(); }

template basic_ostringstream<char>::basic_ostringstream();
template basic_stringstream<char>::basic_stringstream();

}  // namespace std
