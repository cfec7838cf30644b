/*
 * The few system calls that the launcher makes, without a C library.
 *
 * A glibc program spends more time in its own start (relocations, locale, TLS) than the launcher in all of its
 * work; bench/passthrough.py measures it. On processors other than x86-64 and arm64 the C library's syscall() is
 * used instead, and so it is with -DWITH_LIBC, for comparison.
 *
 * Each function returns what the kernel returns: a negative errno on failure.
 */
#ifndef GPUSNAP_KERNEL_H
#define GPUSNAP_KERNEL_H

#include <asm/unistd.h>
#include <linux/errno.h>
#include <linux/fcntl.h>
#include <linux/stat.h>
#include <stddef.h>

#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(WITH_LIBC)
#define WITH_LIBC
#endif

#ifdef WITH_LIBC

long syscall(long number, ...);
int *__errno_location(void);

static long kernel(long number, long a, long b, long c, long d, long e, long f)
{
    long result = syscall(number, a, b, c, d, e, f);

    return result < 0 ? -(long)*__errno_location() : result;
}

#elif defined(__x86_64__)

static long kernel(long number, long a, long b, long c, long d, long e, long f)
{
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;

    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

/* The kernel starts a program with argc, argv, NULL, envp, NULL on the stack (System V ABI, "Process Initialization"). */
__asm__(".globl _start\n"
        "_start:\n"
        "    xor %ebp, %ebp\n"
        "    mov %rsp, %rdi\n"
        "    and $-16, %rsp\n"
        "    call begin\n");

#else /* __aarch64__ */

static long kernel(long number, long a, long b, long c, long d, long e, long f)
{
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;

    __asm__ volatile("svc 0"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
                     : "memory");
    return x0;
}

__asm__(".globl _start\n"
        "_start:\n"
        "    mov x29, #0\n"
        "    mov x30, #0\n"
        "    mov x0, sp\n"
        "    bl begin\n");

#endif

static long open_file(const char *path)
{
    /* Without waiting for somebody to open the other end, should it be a FIFO. */
    return kernel(__NR_openat, AT_FDCWD, (long)path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0, 0, 0);
}

static long read_file(long fd, char *into, size_t size)
{
    return kernel(__NR_read, fd, (long)into, (long)size, 0, 0, 0);
}

static void close_file(long fd)
{
    kernel(__NR_close, fd, 0, 0, 0, 0, 0);
}

static long status(const char *path, struct statx *into)
{
    return kernel(__NR_statx, AT_FDCWD, (long)path, 0, STATX_BASIC_STATS, (long)into, 0);
}

/* Whether this process may execute it, as access(2) says. */
static long executable(const char *path)
{
    return kernel(__NR_faccessat, AT_FDCWD, (long)path, 1 /* X_OK */, 0, 0, 0);
}

static long link_target(const char *path, char *into, size_t size)
{
    return kernel(__NR_readlinkat, AT_FDCWD, (long)path, (long)into, (long)size, 0, 0);
}

static long execute(const char *path, char **argv, char **envp)
{
    return kernel(__NR_execve, (long)path, (long)argv, (long)envp, 0, 0, 0);
}

static void write_to(long fd, const char *text, size_t length)
{
    kernel(__NR_write, fd, (long)text, (long)length, 0, 0, 0);
}

static int is_terminal(long fd)
{
    const long get_attributes = 0x5401; /* TCGETS of asm-generic/ioctls.h */
    char attributes[256];

    return kernel(__NR_ioctl, fd, get_attributes, (long)attributes, 0, 0, 0) == 0;
}

/* Sends one datagram to a Unix socket, if it can be sent at once. */
static void send_to(const char *path, const char *text, size_t length)
{
    const long unix_domain = 1, datagram = 2 | O_CLOEXEC, at_once = 0x40 | 0x4000; /* MSG_DONTWAIT, MSG_NOSIGNAL */
    struct {
        unsigned short family;
        char path[108];
    } address = {1, ""};
    long fd = kernel(__NR_socket, unix_domain, datagram, 0, 0, 0, 0);

    for (size_t i = 0; path[i] != '\0' && i < sizeof(address.path) - 1; i++)
        address.path[i] = path[i];
    if (fd < 0)
        return;
    kernel(__NR_sendto, fd, (long)text, (long)length, at_once, (long)&address, sizeof(address));
    kernel(__NR_close, fd, 0, 0, 0, 0, 0);
}

/* As fork(2): 0 in the child. */
static long fork_process(void)
{
#ifdef __NR_fork
    return kernel(__NR_fork, 0, 0, 0, 0, 0, 0);
#else
    return kernel(__NR_clone, 17 /* SIGCHLD */, 0, 0, 0, 0, 0);
#endif
}

/* The exit code of a child that ends; 128 + the signal's number where a signal ended it. */
static int wait_for_end(long pid)
{
    int ended = 0;
    long got;

    do
        got = kernel(__NR_wait4, pid, (long)&ended, 0, 0, 0, 0);
    while (got == -EINTR);
    if (got != pid)
        return 1;
    return (ended & 0x7f) == 0 ? (ended >> 8) & 0xff : 128 + (ended & 0x7f);
}

#define ENDED_BY_SIGPIPE (128 + 13)

/* From now on a write to a pipe that nobody reads fails, and ends nobody. */
static void ignore_sigpipe(void)
{
    /* As in asm-generic/signal.h: handler (SIG_IGN), flags, restorer, mask. */
    static const unsigned long ignored[4] = {1, 0, 0, 0};

    kernel(__NR_rt_sigaction, 13, (long)ignored, 0, sizeof(ignored[3]), 0, 0);
}

/* Zeroed memory that lives until exec; NULL without any. */
static void *pages(size_t size)
{
    const long read_write = 3, private_anonymous = 0x22; /* as in sys/mman.h, which is the C library's */
    long address = kernel(__NR_mmap, 0, (long)size, read_write, private_anonymous, -1, 0);

    return address < 0 && address > -4096 ? NULL : (void *)address;
}

static void __attribute__((noreturn)) leave(int code)
{
    for (;;)
        kernel(__NR_exit_group, code, 0, 0, 0, 0, 0);
}

#endif
