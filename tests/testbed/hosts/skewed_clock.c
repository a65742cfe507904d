/* Preloaded into every process of a host: its wall clock is CLOCK_SKEW_S seconds ahead, and so are the times of its
 * files. Clocks that only go forward are left alone. Linux has no namespace for the wall clock; libfaketime does not
 * move the times of files on glibc 2.33 and later, and breaks sleeping on the monotonic clock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static long skew(void) {
  const char *text = getenv("CLOCK_SKEW_S");
  return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
  static __typeof__(&clock_gettime) real;
  if (!real) real = REAL(clock_gettime);
  int status = real(clock, at);
  if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += skew();
  return status;
}

int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}

/* The user's own files were written by this clock; those of the system (byte code knows the time of its source) were not. */
static int moved(int status, struct stat *file) {
  if (!status && file->st_uid == geteuid()) file->st_mtime += skew(), file->st_ctime += skew(), file->st_atime += skew();
  return status;
}

int fstatat(int fd, const char *path, struct stat *file, int flags) {
  return moved(REAL(fstatat)(fd, path, file, flags), file);
}
int stat(const char *path, struct stat *file) { return fstatat(AT_FDCWD, path, file, 0); }
int lstat(const char *path, struct stat *file) { return fstatat(AT_FDCWD, path, file, AT_SYMLINK_NOFOLLOW); }
int fstat(int fd, struct stat *file) { return moved(REAL(fstat)(fd, file), file); }
int stat64(const char *path, struct stat64 *file) { return stat(path, (struct stat *)file); }
int lstat64(const char *path, struct stat64 *file) { return lstat(path, (struct stat *)file); }
int fstat64(int fd, struct stat64 *file) { return fstat(fd, (struct stat *)file); }
int fstatat64(int fd, const char *path, struct stat64 *file, int flags) {
  return fstatat(fd, path, (struct stat *)file, flags);
}

/* The file system's clock is the machine's. */
static const struct timespec *moved_back(const struct timespec times[2], struct timespec changed[2]) {
  for (int i = 0; times && i < 2; i++) {
    changed[i] = times[i];
    if (times[i].tv_nsec != UTIME_NOW && times[i].tv_nsec != UTIME_OMIT) changed[i].tv_sec -= skew();
  }
  return times ? changed : NULL;
}
int utimensat(int fd, const char *path, const struct timespec times[2], int flags) {
  struct timespec changed[2];
  return REAL(utimensat)(fd, path, moved_back(times, changed), flags);
}
int futimens(int fd, const struct timespec times[2]) {
  struct timespec changed[2];
  return REAL(futimens)(fd, moved_back(times, changed));
}

/* So is the kernel's, which waits until a time. The clock of a condition is not told; no machine is up for 30 years. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
  struct timespec changed = *until;
  if (changed.tv_sec > 1000000000) changed.tv_sec -= skew();
  return REAL(pthread_cond_timedwait)(condition, mutex, &changed);
}
int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock,
                           const struct timespec *until) {
  struct timespec changed = *until;
  if (clock == CLOCK_REALTIME) changed.tv_sec -= skew();
  return REAL(pthread_cond_clockwait)(condition, mutex, clock, &changed);
}
int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
  struct timespec changed = *until;
  changed.tv_sec -= skew();
  return REAL(sem_timedwait)(semaphore, &changed);
}
