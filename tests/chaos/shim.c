/* Faults of storage for one process tree, by LD_PRELOAD: the control file (CHAOS_CONTROL) holds three int64 that
   are read at every call, so that a fault begins and ends while the processes run.
     [0] full       writes below CHAOS_ROOT fail with ENOSPC
     [1] read_only  files below CHAOS_ROOT cannot be opened for writing, made, renamed: EROFS
     [2] slow       microseconds that a write or fsync below CHAOS_ROOT takes longer */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FULL, READ_ONLY, SLOW };
static volatile int64_t *control;
static const char *root;

__attribute__((constructor)) static void start(void) {
  const char *path = getenv("CHAOS_CONTROL");
  int fd = path ? open(path, O_RDONLY) : -1;
  if (fd < 0) return;
  void *map = mmap(NULL, 3 * sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  if (map != MAP_FAILED) control = map;
  root = getenv("CHAOS_ROOT");
}

static int64_t fault(int kind) { return control ? control[kind] : 0; }
static int below(const char *path) { return root && path && strncmp(path, root, strlen(root)) == 0; }

static int path_below(int dir, const char *path) { /* relative paths: of the working directory or of `dir` */
  char base[PATH_MAX + 1], link[64];
  if (!path || path[0] == '/') return below(path);
  if (dir == AT_FDCWD) return getcwd(base, PATH_MAX) && below(base);
  snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
  ssize_t n = readlink(link, base, PATH_MAX);
  return n > 0 && (base[n] = 0, below(base));
}

static int fd_below(int fd) { return path_below(fd, ""); }

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define WRITING(fd) do { \
    if ((fault(FULL) || fault(SLOW)) && fd_below(fd)) { \
      if (fault(FULL)) { errno = ENOSPC; return -1; } \
      usleep(fault(SLOW)); } } while (0)
#define CHANGING(dir, path) do { if (fault(READ_ONLY) && path_below(dir, path)) { errno = EROFS; return -1; } } while (0)

ssize_t write(int fd, const void *data, size_t n) { REAL(write); WRITING(fd); return real(fd, data, n); }
ssize_t writev(int fd, const struct iovec *v, int n) { REAL(writev); WRITING(fd); return real(fd, v, n); }
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) { REAL(pwrite); WRITING(fd); return real(fd, data, n, at); }
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) { REAL(pwrite64); WRITING(fd); return real(fd, data, n, at); }
int fsync(int fd) { REAL(fsync); if (fault(SLOW) && fd_below(fd)) usleep(fault(SLOW)); return real(fd); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); CHANGING(AT_FDCWD, path); return real(path, mode); }
int rename(const char *from, const char *to) { REAL(rename); CHANGING(AT_FDCWD, to); return real(from, to); }
int unlink(const char *path) { REAL(unlink); CHANGING(AT_FDCWD, path); return real(path); }
int unlinkat(int dir, const char *path, int flags) { REAL(unlinkat); CHANGING(dir, path); return real(dir, path, flags); }

#define OPENS(name, first, dir) { \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); } \
    REAL(name); \
    if (flags & (O_WRONLY | O_RDWR | O_CREAT)) CHANGING(dir, path); \
    return real first; }
int open(const char *path, int flags, ...) OPENS(open, (path, flags, mode), AT_FDCWD)
int open64(const char *path, int flags, ...) OPENS(open64, (path, flags, mode), AT_FDCWD)
int openat(int dir, const char *path, int flags, ...) OPENS(openat, (dir, path, flags, mode), dir)
int openat64(int dir, const char *path, int flags, ...) OPENS(openat64, (dir, path, flags, mode), dir)
