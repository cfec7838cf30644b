/*
 * What is said to people. Errors go to stderr. That another runtime than the settings' runs goes to stderr only
 * where that is a terminal, and else to the system log: programs read stderr. containerd parses what `state`
 * prints on both streams as JSON (go-runc, Runc.State), and conmon gives a container, or what is executed in one,
 * the runtime's stderr as its own.
 */
#ifndef GPUSNAP_TELL_H
#define GPUSNAP_TELL_H

#include "kernel.h"
#include "text.h"

#define SYSTEM_LOG "/dev/log"
#define DAEMON_WARNING "<28>" /* LOG_DAEMON | LOG_WARNING of syslog.h */

static void say(const char *text)
{
    write_to(2, text, length_before(text, '\0'));
}

static void say_number(long number)
{
    char digits[24];
    size_t at = sizeof(digits);

    digits[--at] = '\0';
    do
        digits[--at] = (char)('0' + number % 10);
    while ((number /= 10) > 0 && at > 0);
    say(digits + at);
}

/* The parts, up to NULL, as one line of the program's; `first` tells a command that begins a container. */
static void warn(const char *const *parts, int first)
{
    static char line[2 * PATH_SIZE];
    const char *const before = DAEMON_WARNING "gpusnap-runtime: ";
    const size_t priority = sizeof(DAEMON_WARNING) - 1;
    size_t length = length_before(before, '\0');

    put(line, sizeof(line), 0, before, length);
    for (; *parts != NULL; parts++) {
        size_t more = length_before(*parts, '\0');

        if (put(line, sizeof(line) - 1, length, *parts, more))
            length += more;
    }
    if (is_terminal(2)) {
        line[length] = '\n';
        write_to(2, line + priority, length + 1 - priority);
    } else if (first) {
        send_to(SYSTEM_LOG, line, length);
    }
}

#endif
