/* A server: it answers each number that a connection sends with the next one, as long as that is open. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "gpuwork.h"

#define CONNECTIONS 1024

/* [0] listens. */
static struct pollfd fds[1 + CONNECTIONS];
static struct {
    uint64_t number;
    size_t have;
} parts[1 + CONNECTIONS];
static nfds_t count = 1;

/* False where the connection is over. */
static bool answer(nfds_t at)
{
    char *bytes = (char *)&parts[at].number;
    ssize_t n = recv(fds[at].fd, bytes + parts[at].have, sizeof(uint64_t) - parts[at].have, MSG_DONTWAIT);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR;
    parts[at].have += (size_t)n;
    if (n == 0 || parts[at].have < sizeof(uint64_t))
        return n != 0;
    parts[at].have = 0;
    parts[at].number++;
    return send(fds[at].fd, bytes, sizeof(uint64_t), MSG_NOSIGNAL) == sizeof(uint64_t);
}

static void *serve(void *argument)
{
    (void)argument;
    for (;;) {
        fds[0].events = count <= CONNECTIONS ? POLLIN : 0;
        if (poll(fds, count, -1) < 0 && errno != EINTR)
            die("cannot wait for connections: %s", strerror(errno));
        for (nfds_t at = count - 1; at > 0; at--) {
            if (!fds[at].revents || answer(at))
                continue;
            close(fds[at].fd);
            count--;
            fds[at] = fds[count];
            parts[at] = parts[count];
        }
        int fd = fds[0].revents ? accept4(fds[0].fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK) : -1;
        if (fd >= 0) {
            fds[count] = (struct pollfd){.fd = fd, .events = POLLIN};
            parts[count].have = 0;
            count++;
        }
    }
    return NULL;
}

void serve_start(unsigned port)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_ANY)}};
    pthread_t thread;
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener < 0 || setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) < 0 ||
        bind(listener, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(listener, 512) < 0)
        die("cannot listen on port %u: %s", port, strerror(errno));
    fds[0].fd = listener;
    if (pthread_create(&thread, NULL, serve, NULL) != 0)
        die("cannot start the server");
    pthread_detach(thread);
}
