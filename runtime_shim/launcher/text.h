/* Strings, without a C library. */
#ifndef GPUSNAP_TEXT_H
#define GPUSNAP_TEXT_H

#include <stddef.h>

#define PATH_SIZE 4096 /* PATH_MAX of linux/limits.h, with the final NUL */

static int same(const char *a, const char *b)
{
    while (*a != '\0' && *a == *b) {
        a++;
        b++;
    }
    return *a == *b;
}

static int begins(const char *text, const char *prefix)
{
    while (*prefix != '\0')
        if (*text++ != *prefix++)
            return 0;
    return 1;
}

/* Characters before the first `mark`, or of the whole text when it has none. */
static size_t length_before(const char *text, char mark)
{
    size_t length = 0;

    while (text[length] != '\0' && text[length] != mark)
        length++;
    return length;
}

/* A path's last part. */
static const char *base_name(const char *path)
{
    for (const char *at = path; *at != '\0'; at++)
        if (*at == '/')
            path = at + 1;
    return path;
}

static int listed(const char *word, size_t length, const char *const *list)
{
    for (; *list != NULL; list++)
        if (length == length_before(*list, '\0') && begins(word, *list))
            return 1;
    return 0;
}

/* Copies `length` characters of `text` to into[at...], and a NUL; false when they do not fit into `size`. */
static int put(char *into, size_t size, size_t at, const char *text, size_t length)
{
    if (at >= size || length >= size - at)
        return 0;
    for (size_t i = 0; i < length; i++)
        into[at + i] = text[i];
    into[at + length] = '\0';
    return 1;
}

/* `first` and `second` after each other; false when they do not fit into `size`. */
static int join(char *into, size_t size, const char *first, const char *second)
{
    size_t length = length_before(first, '\0');

    return put(into, size, 0, first, length) && put(into, size, length, second, length_before(second, '\0'));
}

#endif
