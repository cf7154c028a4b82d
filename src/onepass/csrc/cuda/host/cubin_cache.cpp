// cubin_cache.cpp: compiled kernels on disk. Code is loaded from this directory, so only the user may write to it: a
// directory that has another owner, or that others can write to, is not used. A file is written under another name and
// renamed, so that it appears as a whole. A damaged file counts as absent and is written again.
//
//   ONEPASS_CACHE_DIR   another place; "off" switches the cache off
//   else $XDG_CACHE_HOME/onepass, else ~/.cache/onepass
#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "cuda_driver.h"

namespace onepass::cuda {

namespace {

// FNV-1a. It guards against damage and accidents. The directory's owner and mode guard against an attacker, and a
// reader compares the full key that a file holds.
uint64_t fnv(const std::string& text, uint64_t hash) {
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3ull;
  return hash;
}

std::string choose_directory() {
  if (const char* set = std::getenv("ONEPASS_CACHE_DIR"); set && *set) return std::strcmp(set, "off") ? set : "";
  if (const char* set = std::getenv("XDG_CACHE_HOME"); set && *set == '/') return std::string(set) + "/onepass";
  const char* home = std::getenv("HOME");
  if (!home || !*home) {
    const passwd* user = getpwuid(getuid());
    home = user ? user->pw_dir : nullptr;
  }
  return home && *home ? std::string(home) + "/.cache/onepass" : "";
}

// Looks at a path, or at the open file `from` if the path is empty. (glibc 2.28 has no symbol for stat.)
bool look_at(int from, const std::string& path, struct statx* about) {
  return !statx(from, path.c_str(), path.empty() ? AT_EMPTY_PATH : 0, STATX_BASIC_STATS, about);
}

bool is_the_users_alone(const struct statx& about) { return about.stx_uid == geteuid() && !(about.stx_mode & 022); }

bool make_directories(const std::string& path) {
  for (size_t at = 1; at <= path.size(); ++at) {
    if (at < path.size() && path[at] != '/') continue;
    if (mkdir(path.substr(0, at).c_str(), 0700) && errno != EEXIST) return false;
  }
  return true;
}

std::string file_of(const std::string& directory, const std::string& key) {
  return directory + "/" + digest(key) + ".cubin";
}

// A file has the digest of its rest, the length of the key, the key, and the value.
constexpr size_t kDigest = 32, kLength = 8;

std::string seal(const std::string& key, const std::string& value) {
  char length[kLength + 1];
  std::snprintf(length, sizeof length, "%08zx", key.size());
  const std::string rest = length + key + value;
  return digest(rest) + rest;
}

}  // namespace

std::string cache_directory(std::string* why) {
  const std::string directory = choose_directory();
  struct statx about;
  if (directory.empty()) {
    *why = "switched off, or no home directory";
  } else if (!look_at(AT_FDCWD, directory, &about) && !make_directories(directory)) {
    *why = directory + " cannot be made: " + std::strerror(errno);
  } else if (!look_at(AT_FDCWD, directory, &about) || !S_ISDIR(about.stx_mode)) {
    *why = directory + " is not a directory";
  } else if (!is_the_users_alone(about)) {
    *why = directory + " can be written by others; make it yours alone (chmod 700)";
  } else {
    return directory;
  }
  return "";
}

std::string digest(const std::string& text) {
  char out[33];
  std::snprintf(out, sizeof out, "%016llx%016llx", (unsigned long long)fnv(text, 0xcbf29ce484222325ull),
                (unsigned long long)fnv(text, 0x84222325cbf29ce4ull));
  return out;
}

namespace {

std::string read_file(const std::string& folder, const std::string& key, bool of_the_user) {
  const int file = open(file_of(folder, key).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (file < 0) return "";
  std::string bytes;
  struct statx about;
  if (look_at(file, "", &about) && S_ISREG(about.stx_mode) && (!of_the_user || is_the_users_alone(about))) {
    char buffer[65536];
    for (ssize_t got; (got = read(file, buffer, sizeof buffer)) > 0;) bytes.append(buffer, size_t(got));
  }
  close(file);
  if (bytes.size() < kDigest + kLength + key.size()) return "";
  const std::string value = bytes.substr(kDigest + kLength + key.size());
  return bytes == seal(key, value) ? value : "";
}

}  // namespace

std::string cache_read(const std::string& key) {
  std::string why;
  const std::string directory = cache_directory(&why);
  return directory.empty() ? "" : read_file(directory, key, true);
}

std::string read_from(const std::string& folder, const std::string& key) { return read_file(folder, key, false); }

bool cache_write(const std::string& key, const std::string& value) {
  std::string why;
  const std::string directory = cache_directory(&why);
  return !directory.empty() && write_to(directory, key, value);
}

bool write_to(const std::string& folder, const std::string& key, const std::string& value) {
  std::string temporary = folder + "/writing-XXXXXX";
  const int file = mkostemp(temporary.data(), O_CLOEXEC);  // mode 0600
  if (file < 0) return false;                              // a full or read-only disk costs a compile, not the call
  const std::string bytes = seal(key, value);
  std::FILE* const stream = fdopen(file, "wb");
  const bool whole = stream && std::fwrite(bytes.data(), 1, bytes.size(), stream) == bytes.size();
  if (!(stream ? std::fclose(stream) : close(file)) && whole &&
      !rename(temporary.c_str(), file_of(folder, key).c_str()))
    return true;
  unlink(temporary.c_str());
  return false;
}

}  // namespace onepass::cuda
