// older_libstdcxx.cpp: functions that headers of a newer libstdc++ call, and that the libstdc++ of manylinux_2_28 (GCC
// 8) lacks. With them a build runs there, wherever it was made.
#include <new>
#include <sstream>

// Only says whether there is one thread, so that atomics can be plain accesses; no.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

namespace std {

void __throw_bad_array_new_length() { throw bad_array_new_length(); }

template basic_ostringstream<char>::basic_ostringstream();
template basic_stringstream<char>::basic_stringstream();

}  // namespace std
