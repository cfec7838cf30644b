/* A loopback connection within the process: one thread answers each number with the next. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "gpuwork.h"

static int client;

static bool whole(ssize_t (*transfer)(int, void *, size_t), int fd, uint64_t *number)
{
    for (size_t done = 0; done < sizeof(*number);) {
        ssize_t n = transfer(fd, (char *)number + done, sizeof(*number) - done);
        if (n == 0 || (n < 0 && errno != EINTR))
            return false;
        done += n > 0 ? (size_t)n : 0;
    }
    return true;
}

static ssize_t send_bytes(int fd, void *bytes, size_t size) { return send(fd, bytes, size, MSG_NOSIGNAL); }

static void *echo(void *argument)
{
    int fd = (int)(intptr_t)argument;
    uint64_t number;
    while (whole(read, fd, &number)) {
        number++;
        if (!whole(send_bytes, fd, &number))
            break;
    }
    close(fd);
    return NULL;
}

void tcp_start(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof(address);
    pthread_t thread;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || client < 0 || bind(listener, (struct sockaddr *)&address, size) < 0 ||
        listen(listener, 1) < 0 || getsockname(listener, (struct sockaddr *)&address, &size) < 0 ||
        connect(client, (struct sockaddr *)&address, size) < 0)
        die("cannot make a loopback connection: %s; is lo up?", strerror(errno));
    int server = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    close(listener);
    if (server < 0 || pthread_create(&thread, NULL, echo, (void *)(intptr_t)server) != 0)
        die("cannot serve the loopback connection: %s", strerror(errno));
    pthread_detach(thread);
}

bool tcp_exchange(uint64_t counter)
{
    uint64_t number = counter;
    return whole(send_bytes, client, &number) && whole(read, client, &number) && number == counter + 1;
}
